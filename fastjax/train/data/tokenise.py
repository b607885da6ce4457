"""Rows to token ids and loss masks, and prompts to the ids that generation starts from.

What is a target. Chat rows are exactly the template's ids; targets run from after each generation prompt to the
end-of-turn token. Prompt/completion, Alpaca and text rows get BOS if the tokenizer puts one before plain text, and an
EOS at their end that is a target. Alpaca rows are chats where the tokenizer has a chat template and the Alpaca
wording elsewhere. Targets are found by position, never by token id: padding with the EOS token hides no EOS.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastjax.errors import UserError
from fastjax.train.data.encoder import Encoded, Encoder
from fastjax.train.data.rows import (
    AlpacaRow,
    ChatRow,
    IdsRow,
    NormalRow,
    PairRow,
    TextRow,
    alpaca_as_chat,
    alpaca_as_pair,
    check_characters,
    normalise,
)
from fastjax.train.data.template import Span, has_chat_template, render_chat, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN_ON = ("responses", "all")


@dataclass(frozen=True)
class TokenRow:
    """input_ids: [T] int32. loss_mask: [T] bool, True where the token is a target; position 0 never is."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class TextToEncode:
    """A row as text. `spans` None means that every token is a target; `closed` rows get BOS and EOS as plain text."""

    text: str
    cuts: list[int]
    spans: list[Span] | None
    closed: bool


def as_text(
    tokenizer: "PreTrainedTokenizerBase",
    row: NormalRow,
    place: str,
    train_on: str,
    text_parts: tuple[str, str] | None = None,
) -> TextToEncode:
    """The row's text, and the characters in it that are learned. Raises: UserError naming `place`.

    Args:
      text_parts: what stands before a user's turn and before an answer in a text row; None learns it whole.
    """
    assert not isinstance(row, IdsRow), "ids have no text"
    if isinstance(row, AlpacaRow):
        row = alpaca_as_chat(row) if has_chat_template(tokenizer) else alpaca_as_pair(row)
    if isinstance(row, ChatRow):
        chat = render_chat(tokenizer, row, place, spans=train_on == "responses")
        return TextToEncode(chat.text, chat.cuts, chat.spans if train_on == "responses" else None, closed=False)
    if isinstance(row, TextRow):
        spans = _answer_spans(row.text, *text_parts) if text_parts and train_on == "responses" else None
        return TextToEncode(row.text, [], spans, closed=True)
    return _pair_text(row, train_on)


def _answer_spans(text: str, instruction_part: str, response_part: str) -> list[Span]:
    """From after each response_part to the next instruction_part, or to the end."""
    spans, start = [], text.find(response_part)
    while start >= 0:
        start += len(response_part)
        end = text.find(instruction_part, start)
        end = len(text) if end < 0 else end
        spans.append(Span(start, end))
        start = text.find(response_part, end)
    return spans


def _pair_text(row: PairRow, train_on: str) -> TextToEncode:
    text, join = row.prompt + row.completion, len(row.prompt)
    spans = [Span(join, len(text))] if train_on == "responses" else None
    return TextToEncode(text, [join] if join else [], spans, closed=True)


def tokenise(encoder: Encoder, texts: Sequence[TextToEncode]) -> list[TokenRow]:
    """Token ids and loss masks, in the order of `texts`. Raises: UserError if an EOS is needed and there is none."""
    encoded = encoder.encode_batch([text.text for text in texts], [text.cuts for text in texts])
    return [_token_row(encoder, text, row) for text, row in zip(texts, encoded, strict=True)]


def _token_row(encoder: Encoder, text: TextToEncode, encoded: Encoded) -> TokenRow:
    ids, mask = encoded.ids, _target_mask(encoded, text.spans)
    if text.closed:
        if encoder.eos_token_id is None:
            raise UserError(
                "the tokenizer has no EOS token, which ends prompt+completion, Alpaca and text rows; "
                "set eos_token in its tokenizer_config.json"
            )
        before = [] if list(ids[:1]) == encoder.bos_prefix else encoder.bos_prefix
        # What already ends in an EOS to be learned gets no second one.
        ended = list(ids[-1:]) == [encoder.eos_token_id] and mask[-1]
        after = [] if ended else [encoder.eos_token_id]
        ids = np.concatenate([before, ids, after]).astype(np.int32)
        mask = np.concatenate([np.zeros(len(before), bool), mask, np.ones(len(after), bool)])
    mask[:1] = False
    return TokenRow(ids, mask)


def _target_mask(encoded: Encoded, spans: list[Span] | None) -> np.ndarray:
    if spans is None:
        return np.ones(len(encoded.ids), bool)
    mask = np.zeros(len(encoded.ids), bool)
    for span in spans:
        mask |= (encoded.ends > span.start) & (encoded.starts < span.end)
    return mask


def prompt_ids(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Sequence[Mapping[str, Any]],
    chat: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The ids that generation starts from: those that stand before the answer in a training row with this prompt.

    Args:
      prompt: with `chat` messages, or a string taken as one user message; without it the text to continue.
      chat: whether the chat template is applied, with its generation prompt.
      tools: JSON schemas for the template, or the JSON text of their list.
    Raises: UserError for malformed messages or tools, text that is not Unicode, a missing template, or one that refuses
      the conversation.
    """
    encoder = encoder_of(tokenizer, len(tokenizer))
    if not chat:
        if not isinstance(prompt, str):
            raise UserError("the prompt is a message list; a raw prompt is a string, messages need --chat")
        check_characters(prompt, "the prompt")
        ids = encoder.encode(prompt).ids.tolist()
        return ids if ids[:1] == encoder.bos_prefix else encoder.bos_prefix + ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _as_list(prompt)
    row = normalise({"messages": messages, "tools": _as_list(tools)}, "the prompt", "messages")
    assert isinstance(row, ChatRow)
    rendered = render_prompt(tokenizer, row, "the prompt")
    return encoder.encode_batch([rendered.text], [rendered.cuts])[0].ids.tolist()


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # what is no list is normalise's to refuse


@functools.lru_cache(maxsize=2)
def encoder_of(tokenizer: "PreTrainedTokenizerBase", num_tokens: int) -> Encoder:
    """The encoder of a tokenizer; `num_tokens`, its length, makes a new one after tokens were added."""
    return Encoder(tokenizer)
