"""Arrows between the rooms: train -> models -> kernels, leaves import nothing of ours, and nobody imports torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastjax"
FILES = sorted(PACKAGE.rglob("*.py"))
KERNELS_MAY_IMPORT = {"jax", "jaxtyping", "numpy", "fastjax"} | sys.stdlib_module_names
# What a room may import of fastjax; the commands and the Python face, outside the rooms, may import all.
ROOM_MAY_IMPORT = {
    "kernels": {"kernels", "errors"},
    "models": {"kernels", "models", "errors"},
    "hosts": {"errors", "hosts"},
    "train": {"kernels", "models", "train", "errors", "settings", "devices", "cli", "gpu_targets", "hosts", "version"},
}
LOW = {
    "errors.py": set(),
    "settings.py": {"errors"},
    "devices.py": {"errors"},
    "gpu_targets.py": set(),
    "version.py": set(),
    "cli.py": {"errors", "settings", "devices"},
}


def imported(file: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, inside functions and TYPE_CHECKING blocks as well."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            if node.module == "fastjax":
                yield from (f"fastjax.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def our_parts(file: Path) -> set[str]:
    """The second part of every fastjax name that a file imports: a room, or a module beside the rooms."""
    return {name.split(".")[1] for name in imported(file) if name.startswith("fastjax.")}


def run_python(code: str, folder: Path = ROOT) -> str:
    """What the code prints in a Python of its own, started in `folder`."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("room", ROOM_MAY_IMPORT)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    files = [file for file in FILES if file.is_relative_to(PACKAGE / room)]
    assert files
    wrong = {str(file.relative_to(ROOT)): our_parts(file) - ROOM_MAY_IMPORT[room] for file in files}
    assert not {file: parts for file, parts in wrong.items() if parts}


def test_what_every_command_stands_on_imports_no_command() -> None:
    for name, allowed in LOW.items():
        assert our_parts(PACKAGE / name) <= allowed, name


def test_kernels_import_jax_and_the_standard_library_only() -> None:
    for file in FILES:
        if file.is_relative_to(PACKAGE / "kernels"):
            assert {name.split(".")[0] for name in imported(file)} <= KERNELS_MAY_IMPORT, file


def test_no_file_imports_torch_or_the_top_level_links() -> None:
    for file in FILES:
        roots = {name.split(".")[0] for name in imported(file)}
        assert not roots & {"torch", "tensorboardX", "peft", "kernels", "models", "train"}, file


def test_importing_kernels_brings_no_model_or_training_library() -> None:
    ops = sorted(folder.name for folder in (PACKAGE / "kernels").iterdir() if (folder / "__init__.py").exists())
    assert {"attention", "linear_cross_entropy"} <= set(ops)
    code = "import sys\n" + "".join(f"import fastjax.kernels.{op}\n" for op in ops)
    code += "print(sorted({'flax', 'optax', 'transformers', 'torch', 'orbax', 'datasets', 'grain'} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_importing_fastjax_is_cheap() -> None:
    code = "import sys, fastjax\nprint(sorted({'jax', 'flax', 'transformers', 'torch', 'numpy'} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_the_kernels_link_does_not_pass_for_the_package_of_that_name(tmp_path: Path) -> None:
    # In the root `kernels` is importable as a bare folder; transformers must not take it for Hugging Face's package.
    code = "from transformers.utils import is_kernels_available\nprint(is_kernels_available())"
    assert run_python(code, ROOT) == run_python(code, tmp_path)
