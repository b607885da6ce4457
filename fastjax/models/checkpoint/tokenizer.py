"""Tokenizers and chat templates, from a folder or out of a GGUF file, without torch and without remote code.

AutoTokenizer imports torch wherever torch is installed, so the class is chosen here. It matters in one case: for a
SentencePiece-like tokenizer.json whose tokenizer_config.json says LlamaTokenizer, transformers 5 rebuilds the
pre-tokenizer (a leading space, and text after a special token, get no second `▁`). That class is used for such a
folder, which makes the ids those that people get elsewhere. Everywhere else tokenizer.json alone decides, its
post-processor included.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import read_json, write_json
from fastjax.models.values import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from fastjax.models.checkpoint.checkpoint import Checkpoint

# When it is imported, transformers advises to install torch, which is missing on purpose.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def load_tokenizer(model: "str | Path | Checkpoint") -> "PreTrainedTokenizerFast":
    """The tokenizer of a model, with its chat template.

    The template is that of chat_template.jinja, or else of tokenizer_config.json, or of the GGUF file's metadata.

    Args:
      model: HF folder (also an adapter's), .gguf file, hub id, or an opened Checkpoint.
    Raises: UserError if there is no tokenizer, or only a tokenizer.model without the packages that read it.
    """
    folder, gguf = _locate(model)
    if gguf is not None:
        from fastjax.models.checkpoint.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(gguf)
    has_json = (folder / "tokenizer.json").exists()
    if not has_json:
        _require_sentencepiece(folder)
    cls = _tokenizer_class(folder, has_json)
    try:
        return cls.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a file that it cannot parse
        file = "tokenizer.json" if has_json else "tokenizer.model"
        raise UserError(f"the tokenizer of {folder} ({file}) cannot be loaded: {error}") from error


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: str | Path) -> None:
    """Writes the tokenizer and its chat template into `folder`, in the form that transformers reads.

    The template goes both into chat_template.jinja and into tokenizer_config.json, where older programs look. The class
    is always the plain one, under the name that transformers 4 knows too: then tokenizer.json decides, and whoever
    reads the folder gets the ids of this tokenizer (LlamaTokenizer would rebuild it, and loses `legacy` on the way).
    """
    folder = Path(folder)
    tokenizer.save_pretrained(str(folder))
    config = read_json(folder / "tokenizer_config.json")
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    # How this process read it says nothing of the tokenizer.
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    if (template := tokenizer.chat_template) is not None:
        named = isinstance(template, dict)
        config["chat_template"] = [{"name": k, "template": v} for k, v in template.items()] if named else template
    write_json(folder / "tokenizer_config.json", config)


def _locate(model: "str | Path | Checkpoint") -> tuple[Path, Path | None]:
    if not isinstance(model, str | Path):
        return model.folder, model.gguf
    path = Path(os.path.expanduser(model))
    if not os.path.isdir(path):
        from fastjax.models.checkpoint.hub import resolve_model

        path = resolve_model(str(model))
    return (path.parent, path) if path.is_file() else (path, None)


def _require_sentencepiece(folder: Path) -> None:
    if not (folder / "tokenizer.model").is_file():
        raise UserError(f"{folder} has neither tokenizer.json nor tokenizer.model, so it has no tokenizer")
    missing = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if missing:
        raise UserError(
            f"{folder} has only a tokenizer.model, which needs {' and '.join(missing)}; "
            "install them: pip install 'fastjax[sentencepiece]'"
        )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would hold it is missing
        return False


def _tokenizer_class(folder: Path, has_json: bool) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.llama.tokenization_llama import LlamaTokenizer

    if not has_json:
        return LlamaTokenizer
    named = {}
    for file in ("config.json", "tokenizer_config.json"):
        if (folder / file).exists():
            named[file] = read_json(folder / file)
            name = named[file].get("tokenizer_class")
            if name is not None and not isinstance(name, str):
                raise UserError(f"{folder / file}: tokenizer_class={shown(name)} must be the name of a class")
    declared = named.get("tokenizer_config.json", {}).get("tokenizer_class")
    declared = declared or named.get("config.json", {}).get("tokenizer_class") or ""
    is_mistral = named.get("config.json", {}).get("model_type") == "mistral"
    if declared.removesuffix("Fast") != "LlamaTokenizer" or is_mistral or _is_byte_level(folder / "tokenizer.json"):
        return PreTrainedTokenizerFast
    return LlamaTokenizer


def _is_byte_level(file: Path) -> bool:
    """Whether tokenizer.json splits text into bytes (Llama 3), which LlamaTokenizer cannot do."""
    parts = read_json(file)
    return any("ByteLevel" in json.dumps(parts.get(key)) for key in ("pre_tokenizer", "decoder"))
