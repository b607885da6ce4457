"""checkpoint.json: what a checkpoint is and which files it has; written after them, verified before a restore.

Orbax itself restores a flipped bit without a word, so every file's size and SHA-256 is kept; and a SHA-256 of all that,
so that a manifest of which a bit has flipped is not believed either.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import write_json
from fastjax.train import files

MANIFEST = "checkpoint.json"
FORMAT = 2
_CHECKSUM = "sha256"


def write_manifest(folder: Path, contents: Mapping[str, Any]) -> None:
    """Writes `folder`/checkpoint.json: the contents, and size and SHA-256 of every file that lies there.

    Args: contents: step, position, fingerprint and leaves of a checkpoint, in a form that JSON takes.
    """
    found = {
        str(file.relative_to(folder)): [file.stat().st_size, files.sha256(file)] for file in files.files_below(folder)
    }
    manifest = {"format": FORMAT, **contents, "files": found}
    write_json(folder / MANIFEST, {**manifest, _CHECKSUM: checksum(manifest)})


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that `damage` has found whole. Raises: UserError for one of another release."""
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{checkpoint} has format {manifest['format']}, and this release reads format {FORMAT}; go on with the "
            "release that wrote it, or start a new run whose --adapter is that run's adapter"
        )
    return manifest


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, the first of them named; None if all are as they were written."""
    if not (checkpoint / MANIFEST).is_file():
        return f"{checkpoint}: {MANIFEST} is missing"
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{checkpoint}: {MANIFEST} cannot be read ({error})"
    # With its own checksum it is what `write_manifest` wrote, so that no key's presence or type has to be asked for.
    if not isinstance(manifest, dict) or manifest.pop(_CHECKSUM, None) != checksum(manifest):
        return f"{checkpoint}: {MANIFEST} is not as it was written"
    if checkpoint.resolve().name != str(manifest["step"]):
        return f"{checkpoint}: {MANIFEST} is that of step {manifest['step']}"
    for name, (size, digest) in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file():
            return f"{checkpoint}: {name} is missing"
        if file.stat().st_size != size:
            return f"{checkpoint}: {name} has {file.stat().st_size} bytes and was written with {size}"
        if files.sha256(file) != digest:
            return f"{checkpoint}: {name} is not as it was written"
    return None


def checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of what JSON keeps of the manifest."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(manifest)), sort_keys=True).encode()).hexdigest()
