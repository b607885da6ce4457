"""Where tokenised data are kept between runs, and under which key.

A key is made of everything that the tokens follow from: the bytes of the data, the tokenizer, its template, the options
and this code. Nothing is ever looked up by a file's name or date.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import temporary_name
from fastjax.train.data.dataset import TokenisedDataset
from fastjax.train.data.hub import load_split
from fastjax.train.data.readers import FILE_READERS, source_files
from fastjax.train.data.sources import Source
from fastjax.train.data.store import read_store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = 1  # raised whenever equal keys would give other tokens


def cache_folder(setting: str | None) -> Path | None:
    """The folder of a `data_cache_dir`: None is $FASTJAX_CACHE or ~/.cache/fastjax, "off" is no folder."""
    if setting == "off":
        return None
    base = setting or os.environ.get("FASTJAX_CACHE")
    if base:
        return Path(base).expanduser() / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastjax" / "tokens"


def cache_key(source: Source, tokenizer: "PreTrainedTokenizerBase", options: Mapping[str, Any]) -> str:
    """40 hex digits. Raises: UserError for a source that is not there; OSError for one that cannot be read."""
    import tokenizers
    import transformers

    backend: Any = tokenizer.backend_tokenizer
    content = {
        "format": _FORMAT,
        "versions": [transformers.__version__, tokenizers.__version__],
        "data": _data_identity(source),
        "slice": [source.rows.start, source.rows.stop],
        "tokenizer": hashlib.blake2b(backend.to_str().encode()).hexdigest(),
        "special_tokens": tokenizer.special_tokens_map,
        "before_plain_text": tokenizer("")["input_ids"],
        "chat_template": tokenizer.chat_template,
        "options": dict(options),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def cached(folder: Path, key: str, make: Callable[[Path | None], TokenisedDataset]) -> TokenisedDataset:
    """The data set of the key: found in the folder, or made there by `make`, which is given a folder to write into.

    A cache that cannot be written is done without; two processes that make the same do no harm.
    """
    place = folder / key
    found = read_store(place)
    if found is not None:
        return found
    temporary = temporary_name(place)
    try:
        temporary.mkdir(parents=True)
    except OSError:
        return make(None)
    try:
        made = make(temporary)
        if place.exists() and read_store(place) is None:
            shutil.rmtree(place, ignore_errors=True)
        try:
            temporary.rename(place)
        except OSError:  # another process was first; what is mapped stays readable without its name
            shutil.rmtree(temporary, ignore_errors=True)
        return made
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _data_identity(source: Source) -> Any:
    files = source_files(source)
    if files is None:
        # A hub's data set, or one that `datasets` saved: it keeps a digest of its own.
        return ["datasets", load_split(source.name, source.split, source.config, list(FILE_READERS))._fingerprint]
    return ["files", [[path.suffix.lower(), _digest(path)] for path in files]]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
