"""The data files of a folder, by the split that their names tell.

A file belongs to the split whose name is a word of its path within the folder: train.jsonl, validation/rows.csv,
data/test-00000-of-2.parquet. Where no file has such a word, all are of the train split.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from fastjax.errors import UserError

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def files_of_split(folder: Path, split: str | None, suffixes: Iterable[str]) -> list[Path]:
    """The folder's data files of one split, in order of their names, hidden ones left out.

    Args:
      split: None is train.
      suffixes: endings of names that are data files.
    Raises: UserError if there is none.
    """
    endings = tuple(suffixes)
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.name.lower().endswith(endings)
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
        and path.is_file()
    ]
    if not files:
        raise UserError(f"{folder}: no data file in this folder; it needs one of {', '.join(endings)}")
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    wanted = split or "train"
    known = sorted({name for name in splits.values() if name is not None})
    # A name beside the usual three is one that a file or folder bears whole.
    chosen = [path for path in files if splits[path] == wanted or (split and split in path.relative_to(folder).parts)]
    chosen = chosen or [path for path in files if split and path.name.split(".")[0] == split]
    if not known and wanted == "train" and not chosen:
        chosen = files
    if not chosen:
        found = ", ".join(known) or "train (no file's name tells its split)"
        raise UserError(f"{folder}: has no {wanted} split, only {found}; write FOLDER:SPLIT, or name a file")
    return chosen


def _split_of(path: Path) -> str | None:
    words = set(re.split(r"[^a-z]+", str(path).lower()))
    return next((split for split, names in _WORDS.items() if words.intersection(names)), None)
