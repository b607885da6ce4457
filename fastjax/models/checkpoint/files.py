"""Files and folders that appear whole or not at all: a temporary name, a flush to the disk, a rename."""

import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fastjax.errors import UserError

# Every name that a saved model, adapter or tokenizer has in its folder; whatever else lies there is a person's.
OUR_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates",
)
# The largest that there are, tokenizer.json of vocabularies of 256,000, have 35 MB.
_MOST_JSON_BYTES = 64 << 20
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.(tmp|old|removed)", re.DOTALL)
# What temporary_name adds to a name, which has to fit into the file system's limit with it.
_TEMPORARY_BYTES = len(".") + len(".0123456789ab.removed")


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file open for writing that takes the place of `path` when the block ends without an error.

    Raises: OSError, always with a file's name: a write to a full disk alone does not know whose it was.
    """
    temporary = temporary_name(path)
    try:
        with _named_errors(path):
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
def replace_folder(path: Path, overwrite: bool = False, ours: Sequence[str] = OUR_FILES) -> Iterator[Path]:
    """An empty folder beside `path` that takes its place when the block ends without an error.

    A link is followed: what it leads to is replaced, and the link stays.

    Args:
      overwrite: replace a folder that is not empty.
      ours: glob patterns of the entries that are replaced; every other entry is carried over into the new folder.
    Raises: UserError if `path` cannot be such a folder, or is not empty and `overwrite` is False; OSError with a name.
    """
    check_folder(path, "the folder")
    path = Path(os.path.realpath(path))
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise UserError(f"{path} exists and is not an empty folder; choose another one or ask to overwrite it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        with _named_errors(path):
            yield temporary
            for entry in path.iterdir() if path.exists() else ():
                if not any(entry.match(pattern) for pattern in ours) and not os.path.lexists(temporary / entry.name):
                    _carry_over(entry, temporary / entry.name)
            _flush_folder(temporary)
            if path.exists() and any(path.iterdir()):
                # Two renames: there is a moment without `path`, and never one with half of it. A kill in between
                # leaves the old folder under a name from which remove_leftovers brings it back.
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


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left in `folder` under our temporary names, and nothing else.

    A folder that was moved aside when the kill came gets its name back.
    """
    for path in folder.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if not found:
            continue
        if found[2] == "old" and not os.path.lexists(folder / found[1]):
            path.rename(folder / found[1])
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether the name is one that `remove_leftovers` takes care of."""
    return _TEMPORARY.fullmatch(path.name) is not None


def check_folder(path: Path, name: str) -> None:
    """Whether `path` is a folder, or one could be made there; nothing is made.

    Args: name: of the setting, for the message.
    Raises: UserError for a file, a path below a file, a link to nowhere or in a circle, a name that is too long, a
      place that cannot be written.
    """
    given = f"{name}={str(path)!r}"
    for place in (path, *path.absolute().parents):
        try:
            kind = os.stat(place).st_mode
        except FileNotFoundError:
            if place.is_symlink():
                raise UserError(f"{given}: {place} is a link to nowhere; give another folder") from None
            if len(os.fsencode(place.name)) + _TEMPORARY_BYTES > 255:
                raise UserError(f"{given}: the name is too long; give a shorter one") from None
            continue
        except NotADirectoryError:
            # The file is one of the parents.
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{given} cannot be used: {reason}; give another folder") from error
        if not stat.S_ISDIR(kind):
            what = "is a file" if place == path else f"lies below {place}, which is a file"
            raise UserError(f"{given} {what}; give a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise UserError(f"{given}: {place} cannot be written; give a folder that can")
        return


def check_replaceable(path: Path, name: str) -> None:
    """Raises: UserError if a folder cannot be swapped for another: a mount point, or one that this process works in."""
    where = os.path.realpath(path)
    if os.path.ismount(where):
        what = "is a mount point"
    elif where == os.path.commonpath([where, os.getcwd()]):
        what = "is the folder that this command runs in, or one above it"
    else:
        return
    raise UserError(f"{name}={str(path)!r} {what}, and is replaced as a whole; give a folder below it")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    with replace_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises: UserError naming the file if it cannot be read, is not JSON or is not an object.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path} cannot be read: Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is a pipe or a device, not a JSON file")
    if status.st_size > _MOST_JSON_BYTES:
        raise UserError(
            f"{path} has {status.st_size} bytes, and a JSON file of a model at most {_MOST_JSON_BYTES}; is it "
            "another file?"
        )
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def temporary_name(path: Path, suffix: str = "tmp") -> Path:
    """A name beside `path` that nobody else has, and that `remove_leftovers` knows; suffix is tmp, old or removed."""
    # Not the tempfile module: what it makes only its owner can read, and a model is often read by others.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.{suffix}")


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _carry_over(source: Path, target: Path) -> None:
    """The same file, folder or link under another name, without a copy where the file system can do without."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:
            shutil.copy2(old, new, follow_symlinks=False)

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))


def _flush_folder(path: Path) -> None:
    # A rename is on the disk only when its folder is. Some network file systems cannot flush a folder.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
