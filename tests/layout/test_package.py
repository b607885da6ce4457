"""What ships: the wheel's files, the links at the top, no leftovers of the machine that wrote them."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Every file that git knows, or would take if asked; links left out."""
    list_files = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel, built without a network by the setuptools that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    # From a copy, since a build writes beside the sources.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for file in (ROOT / "fastjax").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            target = source / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    for link in ("kernels", "models", "train"):
        (source / link).symlink_to(Path("fastjax") / link)
    done = subprocess.run([sys.executable, "-c", build, folder], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_python_file_and_py_typed(wheel_files: set[str]) -> None:
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "fastjax").rglob("*.py")}
    assert {f"fastjax/kernels/{op}/__init__.py" for op in ("attention", "linear_cross_entropy")} <= files
    assert files | {"fastjax/py.typed"} <= wheel_files


def test_the_wheel_holds_nothing_else(wheel_files: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_files if ".dist-info" not in name} == {"fastjax"}


def test_kernels_is_no_package_of_its_own() -> None:
    assert not (ROOT / "fastjax" / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("room", ["kernels", "models", "train"])
def test_the_link_at_the_top_leads_into_the_package(room: str) -> None:
    assert (ROOT / room).is_symlink()
    assert (ROOT / room).resolve() == ROOT / "fastjax" / room


def test_tests_have_no_init_files() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_file_names_a_place_on_somebodys_machine(tracked: list[Path]) -> None:
    places = re.compile(r"(?<![\w.~-])/(?:root|home|work|opt|Users|mnt|tmp/[a-z])/\S")
    found = []
    for path in tracked:
        if path == Path(__file__) or path.suffix in (".png", ".gguf", ".safetensors", ".model"):
            continue
        text = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(ROOT)}: {hit.group()}" for hit in places.finditer(text)]
    assert not found


def test_every_python_file_is_small(tracked: list[Path]) -> None:
    long = {str(path.relative_to(ROOT)): n for path in tracked if path.suffix == ".py" and (n := lines(path)) > 400}
    assert not long


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
