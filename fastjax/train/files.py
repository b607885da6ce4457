"""What run folders need beside `models.checkpoint.files`: checksums, flushes, removal that is never half seen."""

import os
import shutil
import uuid
import zlib
from pathlib import Path

_REMOVED = ".removed"


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
    """Removes a folder; a kill half-way leaves another name, never a folder with some of its files."""
    doomed = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_REMOVED}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left in `folder` under temporary names."""
    for pattern in (".*.tmp", ".*.old", f".*{_REMOVED}"):
        for path in folder.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
