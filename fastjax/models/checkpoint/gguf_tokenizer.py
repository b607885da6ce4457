"""The tokenizer that a GGUF file describes in its metadata.

transformers can read it too, but its reader imports torch. Two kinds occur in Llama files: "gpt2", byte-level BPE with
its merges listed and a name for how text is split first; and "llama", SentencePiece, whose merges follow from the
scores.
Source: llama.cpp's names of pre-tokenizers, and the tokenizer.json of the models they stand for.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.gguf_header import read_gguf_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split before merging, by the name in tokenizer.ggml.pre.
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
_REGEXES = {**dict.fromkeys((*_LLAMA3_NAMES, "smaug-bpe", "dbrx"), _LLAMA3), "tekken": _TEKKEN}
# Their vocabularies hold whole words that the merges cannot reach, and they begin with BOS unless the file says no.
_WHOLE_WORDS = frozenset({*_LLAMA3_NAMES, "tekken"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_GPT2 = frozenset(
    {"gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "gigachat", "jais", "trillion", "granite-docling"}
)


def tokenizer_from_gguf(path: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a GGUF file, with its special tokens and chat template.

    Raises: UserError if the file has no tokenizer or one of another kind.
    """
    from transformers import PreTrainedTokenizerFast

    metadata = read_gguf_header(path).metadata
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, kind = values.get("tokens"), values.get("model")
    if not isinstance(tokens, list) or kind not in ("gpt2", "llama"):
        raise UserError(f"{path} has a tokenizer of the kind {kind!r}; 'gpt2' and 'llama' are read")
    try:
        tokenizer = _byte_level(path, values) if kind == "gpt2" else _sentencepiece(path, values)
        _add_special(tokenizer, tokens, values.get("token_type") or [])
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for merges that do not fit
        raise UserError(f"{path}: its tokenizer cannot be built: {error}") from error
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        index = values.get(f"{key}_token_id")
        if index is not None:
            if not isinstance(index, int) or not 0 <= index < len(tokens):
                raise UserError(f"{path}: {key}_token_id={index!r}, and there are {len(tokens)} tokens")
            special[name] = tokens[index]
    _add_ends(tokenizer, special, values, default_bos=kind == "llama" or values.get("pre") in _WHOLE_WORDS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        **special,
    )


def _byte_level(path: Path, values: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(values["tokens"])}
    merges = values.get("merges")
    if not isinstance(merges, list):
        raise UserError(f"{path} has a gpt2 tokenizer without tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    pre = values.get("pre")
    model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _REGEXES)
    if pre in _REGEXES:
        split: Any = pre_tokenizers.Split(Regex(_REGEXES[pre]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        if pre not in _GPT2:
            warnings.warn(
                f"{path}: the pre-tokenizer {pre!r} is not known; text is split as for GPT-2, and ids may differ",
                stacklevel=4,
            )
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, values: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, scores = values["tokens"], values.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise UserError(f"{path} has a llama tokenizer without one of tokenizer.ggml.scores for every token")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = values.get("unknown_token_id", 0)
    tokenizer = Tokenizer(models.BPE(
        vocab=vocab, merges=_merges(vocab, scores), fuse_unk=True, byte_fallback=True, unk_token=tokens[unknown],
    ))  # fmt: skip
    prefix = values.get("add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if prefix else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score of the result first."""
    found = []
    for token, index in vocab.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[index], left, right) for left, right in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_special(tokenizer: "Tokenizer", tokens: list[str], kinds: list[int]) -> None:
    from tokenizers import AddedToken

    of_kind = {kind: [token for token, its in zip(tokens, kinds, strict=False) if its == kind and token]
               for kind in (_CONTROL, _USER_DEFINED)}  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in of_kind[_CONTROL]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in of_kind[_USER_DEFINED]])


def _add_ends(tokenizer: "Tokenizer", special: dict[str, str], values: Mapping[str, Any], default_bos: bool) -> None:
    from tokenizers import processors

    def end(name: str, default: bool) -> list[str]:
        wanted = values.get(f"add_{name}_token", default) and f"{name}_token" in special
        return [special[f"{name}_token"]] if wanted else []

    bos, eos = end("bos", default_bos), end("eos", False)
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys([*bos, *eos])],
        )
