"""Files and folders that appear whole or not at all: a temporary name, a flush to the disk, a rename."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fastjax.errors import UserError


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file open for writing that takes the place of `path` when the block ends without an error."""
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


@contextmanager
def replace_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder beside `path` that takes its place when the block ends without an error.

    Raises: UserError if `path` is a file, or a folder that is not empty and `overwrite` is False.
    """
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not overwrite)):
        raise UserError(f"{path} exists and is not an empty folder; choose another one or ask to overwrite it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        _flush_folder(temporary)
        if path.exists() and any(path.iterdir()):
            # Two renames: there is a moment without `path`, and never one with half of it.
            old = temporary.with_suffix(".old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    with replace_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises: UserError naming the file if it cannot be read, is not JSON or is not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _temporary(path: Path) -> Path:
    # Not the tempfile module: what it makes only its owner can read, and a model is often read by others.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def _flush_folder(path: Path) -> None:
    # A rename is on the disk only when its folder is. Some network file systems cannot flush a folder.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
