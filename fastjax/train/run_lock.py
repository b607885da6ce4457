"""One run at a time in a folder: a lock that the kernel lets go of when its owner ends, however it ends."""

import errno
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import check_folder

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder`/.lock while the block runs; folders made for it go again if nothing else came into them.

    Where the file system has no locks, a warning says so.
    Raises: UserError naming the process that has the folder, in this process too.
    """
    check_folder(folder, "output_dir")
    made = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = _acquire(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)
        for place in made:
            try:
                place.rmdir()
            except OSError:
                break


def check_not_locked(folder: Path) -> None:
    """Raises: UserError if another process has the folder. Nothing is written, and nothing is held afterwards."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        owner = _owner(handle)
        if error.errno in (errno.EAGAIN, errno.EACCES) and owner != _self():
            raise _in_use(folder, owner) from None
    finally:
        os.close(handle)


def _acquire(folder: Path) -> int:
    path = folder / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                owner = _owner(handle)
                os.close(handle)
                raise _in_use(folder, owner) from None
            warnings.warn(
                f"{path} cannot be locked ({error.strerror}): start no second run in this folder", stacklevel=4
            )
        # The owner before may have removed the file between our opening and our locking it.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(_self()).encode())
    return handle


def _self() -> dict[str, str | int]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _owner(handle: int) -> dict[str, str | int]:
    """What the owner wrote; empty in the moment before it has."""
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(folder: Path, owner: dict[str, str | int]) -> UserError:
    return UserError(
        f"output_dir={str(folder)!r} is in use by a run of process {owner.get('pid', '(unknown)')} on host "
        f"{owner.get('host', '(unknown)')}; wait for its end, stop it, or give another folder"
    )
