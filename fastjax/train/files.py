"""What run folders need beside `models.checkpoint.files`: checksums, flushes, removal that is never half seen."""

import os
import shutil
import zlib
from pathlib import Path

from fastjax.models.checkpoint.files import temporary_name


def files_below(folder: Path) -> list[Path]:
    """Every regular file below the folder, in order of its name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flush(folder: Path) -> None:
    """Puts the contents of every file below `folder` on the disk: a rename must not get there before them."""
    for path in files_below(folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def crc32(path: Path) -> int:
    """The file's CRC-32, read in pieces of 4 MiB."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value


def remove_folder(path: Path) -> None:
    """Removes a folder, or a link to one; a kill half-way leaves another name, never some of its files."""
    if path.is_symlink():
        path.unlink()
        return
    doomed = temporary_name(path, "removed")
    path.rename(doomed)
    shutil.rmtree(doomed)
