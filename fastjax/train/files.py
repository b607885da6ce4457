"""Writes that are either wholly there or not there at all: a temporary name beside the target, then a rename."""

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path to write; it takes `path`'s name when the block ends well, and is removed otherwise."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text so that a reader sees the old file or the new one, never a part."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it replaces `path` when the block ends well, and is removed otherwise."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in files_below(temporary):
            _sync(file)
        if path.exists():
            remove_folder(path)
        os.rename(temporary, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Removes a folder; a kill half-way leaves a temporary name, never a folder with some of its files."""
    doomed = path.with_name(f"{TEMPORARY}{os.getpid()}-removed-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Removes what writers that were killed left behind in `folder`."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def files_below(folder: Path) -> list[Path]:
    """Every regular file below the folder, in order of its name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def crc32(path: Path) -> int:
    """The file's CRC-32, read in pieces of 4 MiB."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value


def _sync(path: Path) -> None:
    # Without this a power cut after the rename can leave the new name with empty contents.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
