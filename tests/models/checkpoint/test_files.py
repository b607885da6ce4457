"""Whole files and folders or none, other people's files left alone, and paths that cannot be refused by name."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import (
    check_folder,
    check_replaceable,
    remove_leftovers,
    replace_file,
    replace_folder,
)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("linked", [False, True])
def test_a_replaced_folder_keeps_what_is_not_ours(tmp_path: Path, linked: bool) -> None:
    folder = tmp_path / "big" / "adapter"
    (folder / "notes").mkdir(parents=True)
    for name in ("config.json", "model-00002-of-00002.safetensors", "README.md", "notes/a.txt"):
        (folder / name).write_text("old")
    (folder / "away").symlink_to("/nowhere")
    given = folder
    if linked:
        given = tmp_path / "adapter"
        given.symlink_to(folder)
    with replace_folder(given, overwrite=True) as new:
        (new / "config.json").write_text("new")
    assert tree(folder) == {"config.json": "new", "README.md": "old", "notes/a.txt": "old"}
    assert os.readlink(folder / "away") == "/nowhere"
    assert given.is_symlink() == linked
    assert [p.name for p in folder.parent.iterdir()] == ["adapter"]


def test_a_failed_replacement_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    with pytest.raises(RuntimeError), replace_folder(folder, overwrite=True) as new:
        (new / "config.json").write_text("new")
        raise RuntimeError
    assert tree(tmp_path) == {"model/config.json": "old"}


def test_only_our_own_temporary_names_are_removed(tmp_path: Path) -> None:
    mine = (".notes.tmp", ".x.old", ".a.removed", ".b.0123456789ab.txt", "c.0123456789ab.tmp", ".d.0123456789AB.tmp")
    for name in (*mine, ".config.yaml.0123456789ab.tmp", ".kept.0123456789ab.old"):
        (tmp_path / name).write_text("")
    for name in (".7.0123456789ab.removed", ".8.0123456789ab.tmp", "kept"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted((*mine, "kept"))


def test_a_folder_that_a_kill_left_moved_aside_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".adapter.0123456789ab.old").mkdir()
    (tmp_path / ".adapter.0123456789ab.old" / "notes.txt").write_text("mine")
    (tmp_path / ".adapter.0123456789ab.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert tree(tmp_path) == {"adapter/notes.txt": "mine"}


def test_a_full_disk_names_the_file(full_disk: Path) -> None:
    with pytest.raises(OSError) as stopped, replace_file(full_disk / "a") as file:
        file.write(bytes(100_000))
    assert (stopped.value.errno, stopped.value.filename) == (errno.ENOSPC, str(full_disk / "a"))
    with pytest.raises(OSError) as stopped, replace_folder(full_disk / "b") as folder:
        (folder / "c").write_bytes(bytes(100_000))
    assert (stopped.value.errno, stopped.value.filename) == (errno.ENOSPC, str(full_disk / "b"))
    assert list(full_disk.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("file", "is a file"),
        ("file/a/b", "lies below .*/file, which is a file"),
        ("dangling", "link to nowhere"),
        ("dangling/a", "link to nowhere"),
        ("circle", "symbolic links"),
        ("circle/a", "symbolic links"),
        ("a" * 300, "too long"),
        ("new/" + "a" * 300 + "/b", "too long"),
        ("a\0b", "null"),
    ],
)
def test_a_path_that_can_be_no_folder_is_refused_by_name(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UserError, match=f"(?s)output_dir=.*{words}"):
        check_folder(tmp_path / path, "output_dir")
    if "\0" not in path:
        with pytest.raises(UserError), replace_folder(tmp_path / path):
            pass
    check_folder(tmp_path / "new" / "deep", "output_dir")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["circle", "dangling", "file"]


def test_a_folder_that_cannot_be_swapped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for place in (Path("."), tmp_path):
        with pytest.raises(UserError, match="this command runs in"):
            check_replaceable(place, "output_dir")
    with pytest.raises(UserError, match="mount point"):
        check_replaceable(Path("/proc"), "output_dir")
    check_replaceable(tmp_path / "other", "output_dir")
