"""Text to token ids, exactly as the tokenizer does it, and with cuts where inference prompts end.

Works on copies of the fast tokenizer's backend: one without its post-processor (that adds BOS, and in some files
trims white space from the offsets), truncation and padding; and one that also adds no leading space, for text that
goes on from other text.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastjax.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Encoded:
    """Token ids with their characters.

    ids: [T] int32. starts, ends: [T] int64, the characters [start, end) of the text that each token covers.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Encoder:
    """Token ids for the rows of a data set; special tokens written in a text are read as such, none are added."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises: UserError for a tokenizer without a fast backend."""
        from tokenizers import Tokenizer

        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{type(tokenizer).__name__} has no fast backend, which the character offsets come from; "
                "load it as PreTrainedTokenizerFast (a tokenizer.json)"
            )
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        settings.update(post_processor=None, truncation=None, padding=None)
        self._settings = settings
        self._whole = Tokenizer.from_str(json.dumps(settings))
        self._continuation: Tokenizer | None = None
        self._added = frozenset(token["id"] for token in settings["added_tokens"])
        self._tails: dict[str, list[int]] = {}
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.bos_prefix = _bos_prefix(tokenizer)

    def encode(self, text: str) -> Encoded:
        """The ids of one text."""
        return _encoded(self._whole.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: list[str], cuts: list[list[int]]) -> list[Encoded]:
        """The ids of many texts, such that each cut falls between two tokens.

        The ids before a cut are those of the text before it, tokenised alone: what inference would start from. Where
        the tokenizer would join characters across a cut, or read the text before it differently, the rest is
        tokenised by itself; everywhere else the ids are those of the whole text.

        Args:
          texts: the rendered rows.
          cuts: ascending character positions for each text.
        """
        whole = self._whole.encode_batch(texts, add_special_tokens=False)
        return [self._cut(text, _encoded(e), c) for text, e, c in zip(texts, whole, cuts, strict=True)]

    def token(self, token_id: int) -> str | None:
        """The text of a token id, or None for an unknown id."""
        return self._whole.id_to_token(token_id)

    def _cut(self, text: str, encoded: Encoded, cuts: list[int]) -> Encoded:
        pieces: list[Encoded] = []
        base = 0
        for cut in cuts:
            if self._falls_between_tokens(text[base:], encoded, cut - base, continued=base > 0):
                continue
            pieces.append(_shifted(self._piece(text[base:cut], continued=base > 0), base))
            base = cut
            encoded = self._piece(text[base:], continued=True)
        return _joined([*pieces, _shifted(encoded, base)]) if pieces else encoded

    def _piece(self, text: str, *, continued: bool) -> Encoded:
        return self._continue(text) if continued else self.encode(text)

    def _falls_between_tokens(self, text: str, encoded: Encoded, cut: int, *, continued: bool) -> bool:
        """Whether the first tokens of the text are those of text[:cut] alone."""
        count = int(np.searchsorted(encoded.ends, cut, side="right"))
        straddled = count < len(encoded.ids) and encoded.starts[count] < cut
        if not straddled and not continued and self._same_tail(text, encoded, cut, count):
            return True
        alone = self._piece(text[:cut], continued=continued).ids
        return np.array_equal(encoded.ids[: len(alone)], alone) and not (
            len(alone) < len(encoded.ids) and encoded.starts[len(alone)] < cut
        )

    def _same_tail(self, text: str, encoded: Encoded, cut: int, count: int) -> bool:
        """The test of `_falls_between_tokens` on the text since the last added token only.

        Tokenizers split at added tokens first and read what lies between independently, so the tail decides. A chat
        template's tail is the same few characters in every row, hence the memo.
        """
        first = next((k for k in range(count - 1, -1, -1) if int(encoded.ids[k]) in self._added), None)
        if first is None:
            return False
        tail = text[int(encoded.starts[first]) : cut]
        if tail not in self._tails:
            if len(self._tails) > 10_000:
                self._tails.clear()
            self._tails[tail] = self._whole.encode(tail, add_special_tokens=False).ids
        return self._tails[tail] == encoded.ids[first:count].tolist()

    def _continue(self, text: str) -> Encoded:
        """The ids of a text that goes on from another: no leading space is added."""
        from tokenizers import Tokenizer

        if self._continuation is None:
            settings = json.dumps(_without_leading_space(self._settings))
            self._continuation = Tokenizer.from_str(settings)
        return _encoded(self._continuation.encode(text, add_special_tokens=False))


def _encoded(encoding: "Encoding") -> Encoded:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return Encoded(np.array(encoding.ids, np.int32), offsets[:, 0], offsets[:, 1])


def _shifted(encoded: Encoded, characters: int) -> Encoded:
    return Encoded(encoded.ids, encoded.starts + characters, encoded.ends + characters)


def _joined(pieces: list[Encoded]) -> Encoded:
    return Encoded(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.starts for piece in pieces]),
        np.concatenate([piece.ends for piece in pieces]),
    )


def _bos_prefix(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """[BOS] if the tokenizer puts it before plain text, else []."""
    added = list(tokenizer("")["input_ids"])
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and added[:1] == [bos] else []


def _without_leading_space(settings: dict[str, Any]) -> dict[str, Any]:
    """Tokenizer settings that do not put a space before the text."""
    changed = dict(settings)
    changed["pre_tokenizer"] = _switch_off(settings["pre_tokenizer"])
    changed["normalizer"] = _switch_off(settings["normalizer"])
    return changed


def _switch_off(part: dict[str, Any] | None) -> dict[str, Any] | None:
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        return {**part, key: [kept for item in part[key] if (kept := _switch_off(item)) is not None]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel" and "add_prefix_space" in part:
        return {**part, "add_prefix_space": False}
    return part
