"""What run folders need beside `models.checkpoint.files`: checksums, flushes, room, removal that is never half seen."""

import errno
import hashlib
import os
import resource
import shutil
from pathlib import Path

from fastjax.models.checkpoint.files import temporary_name

# Orbax begins another data file from about here on.
_LARGEST_FILE = 2 << 30


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


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_room(folder: Path, num_bytes: int) -> None:
    """Whether the disk of an existing folder has room for so many bytes; nothing is written.

    Raises: OSError with ENOSPC, or with EFBIG where this process may not write so large a file.
    """
    disk = os.statvfs(folder)
    # A file system that does not count its blocks says that it has none.
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY and largest < min(num_bytes, _LARGEST_FILE):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(folder))


def remove_folder(path: Path) -> None:
    """Removes a folder, or a link to one; a kill half-way leaves another name, never some of its files."""
    if path.is_symlink():
        path.unlink()
        return
    doomed = temporary_name(path, "removed")
    path.rename(doomed)
    shutil.rmtree(doomed)
