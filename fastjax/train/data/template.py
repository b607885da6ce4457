"""Chat templates: conversations to text, and where in that text the answers lie.

Rendering goes through transformers' ImmutableSandboxedEnvironment and under a time limit: templates come from model
files and are not trusted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.train.data.messages import Message
from fastjax.train.data.rows import ChatRow, check_characters
from fastjax.train.data.time_limit import TimeIsUp, TimeLimit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_RENDERING = TimeLimit(seconds=10)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the rendered text that are to be learned; `start` is where inference would begin."""

    start: int
    end: int


@dataclass(frozen=True)
class RenderedChat:
    """The template's text, where its inference prompts end, and the spans of its trained answers, all in order."""

    text: str
    cuts: list[int]
    spans: list[Span]


def has_chat_template(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def require_chat_template(tokenizer: "PreTrainedTokenizerBase", place: str) -> None:
    """Raises: UserError if the tokenizer has no chat template."""
    if not has_chat_template(tokenizer):
        raise UserError(
            f"{place}: a chat, but the tokenizer has no chat template; use an instruction-tuned model's tokenizer, "
            "name one with --chat_template (chatml, llama-3, mistral, zephyr, alpaca, or a file), put a "
            "chat_template.jinja into the model folder, or write the rows as prompt+completion"
        )


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: list[Any] | None = None,
    *,
    add_generation_prompt: bool = False,
    place: str = "chat",
) -> str:
    """The conversation as the tokenizer's chat template writes it.

    Raises: UserError if there is no template, or if the template refuses the conversation or fails.
    """
    return _rendered(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt, place=place)[0]


def _rendered(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: list[Any] | None,
    *,
    add_generation_prompt: bool,
    place: str,
    mark: bool = False,
) -> tuple[str, list[Span]]:
    """The text, and with `mark` what the template's generation markers enclose. Raises: as `render`."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    require_chat_template(tokenizer, place)
    template = tokenizer.get_chat_template(None, tools)
    # Its annotation says that a text is returned; it is lists of them and of their marked parts.
    render_template: Any = render_jinja_template
    try:
        [text], marked = _RENDERING.run(
            lambda: render_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=mark,
                add_generation_prompt=add_generation_prompt,
                **tokenizer.special_tokens_map,
            )
        )
    except TimeIsUp:
        raise UserError(
            f"{place}: the chat template was not done after {_RENDERING.seconds:g} s and was stopped; "
            "look for a loop without an end in it"
        ) from None
    except jinja2.exceptions.SecurityError as error:
        raise UserError(
            f"{place}: the chat template tried something unsafe and was stopped ({error}); "
            "do not trust this model's files"
        ) from None
    except (
        jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError,
        MemoryError,
    ) as error:  # fmt: skip
        roles = " ".join(str(message["role"]) for message in messages)
        raise UserError(
            f"{place}: the chat template refuses this conversation ({_first_line(error)}); its roles are: {roles}"
        ) from None
    assert isinstance(text, str)
    check_characters(text, f"{place}: the text that the chat template wrote")
    return text, [Span(start, end) for start, end in marked[0]] if mark else []


def render_chat(tokenizer: "PreTrainedTokenizerBase", row: ChatRow, place: str, *, spans: bool = True) -> RenderedChat:
    """The whole conversation, the ends of the prompts that inference would start from, and the trained answers.

    An answer is what the template's own generation markers enclose, where it has them for each answer. Elsewhere it
    runs from after its generation prompt to its end-of-turn token, and the template's white space after that is left
    out: both ends come from rendering prefixes of the conversation: prefix i with the generation prompt
    ends where the answer starts, prefix i + 1 ends where it ends. Where a template writes a prefix differently from
    the beginning of the whole (a default system turn, reasoning cut out of earlier answers), the place is found by
    exchanging the answer for other text and seeing what stays equal.

    Raises: UserError if the template fails, or writes an answer in a way that hides where it lies.
    """
    chat = _Chat(tokenizer, row, place)
    cuts = chat.cuts()
    found = []
    if spans:
        marked = chat.marked()
        answers = (i for i, trained in enumerate(row.trained) if trained)
        found = [chat.span(i, cuts.get(i)) for i in answers] if marked is None else marked
    return RenderedChat(chat.text, list(cuts.values()), found)


def render_prompt(tokenizer: "PreTrainedTokenizerBase", row: ChatRow, place: str) -> RenderedChat:
    """The prompt for the next answer, with the ends of the prompts before it. Raises: as `render`."""
    chat = _Chat(tokenizer, row, place, add_generation_prompt=True)
    return RenderedChat(chat.text, list(chat.cuts().values()), [])


class _Chat:
    """One conversation, rendered whole and by prefixes."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", row: ChatRow, place: str, *, add_generation_prompt: bool = False
    ) -> None:
        self._tokenizer, self._row, self._place = tokenizer, row, place
        self.text = self._render(row.messages, add_generation_prompt=add_generation_prompt)

    def marked(self) -> list[Span] | None:
        """The trained answers by the template's markers; None if it has none, or not one for each answer."""
        template = self._tokenizer.get_chat_template(None, self._row.tools)
        if not _GENERATION.search(template):
            return None
        _, spans = _rendered(
            self._tokenizer, self._row.messages, self._row.tools, add_generation_prompt=False, place=self._place,
            mark=True,
        )  # fmt: skip
        answers = [
            trained
            for message, trained in zip(self._row.messages, self._row.trained, strict=True)
            if message["role"] == "assistant"
        ]
        if len(spans) != len(answers):
            return spans if all(answers) else None
        return [span for span, trained in zip(spans, answers, strict=True) if trained]

    def cuts(self) -> dict[int, int]:
        """{message index: where its generation prompt ends} for the answers whose prompt begins the whole text."""
        found = {}
        for index, message in enumerate(self._row.messages):
            if message["role"] == "assistant" and index > 0:
                prompt = self._prefix(index, add_generation_prompt=True)
                if prompt is not None and self.text.startswith(prompt):
                    found[index] = len(prompt)
        return found

    def span(self, index: int, cut: int | None) -> Span:
        """Where answer `index` lies; `cut` is the end of its prompt, if that is known."""
        start = self._content(index)[0] if cut is None else cut
        return Span(start, max(start, self._end(index, start)))

    def _end(self, index: int, start: int) -> int:
        last = index == len(self._row.messages) - 1
        until = self.text if last else self._prefix(index + 1)
        if until is not None and self.text.startswith(until):
            # An answer that itself ends in white space keeps it where no end-of-turn token follows.
            content = self._row.messages[index]["content"]
            kept = until.rfind(content, start) + len(content) if content.strip() else 0
            return max(len(until.rstrip()), kept)
        _, end = self._content(index)
        stop = index + 1
        row = ChatRow(self._row.messages[:stop], self._row.trained[:stop], self._row.tools)
        turn = _Chat(self._tokenizer, row, self._place)
        closing = turn.text[turn._content(index)[1] :].rstrip()
        if not self.text.startswith(closing, end):
            raise self._hidden(index)
        return end + len(closing)

    def _content(self, index: int) -> tuple[int, int]:
        """Where the content of answer `index` stands, by what is common to renderings with other contents."""
        first, second = (self._with_content(index, content) for content in _PROBES)
        start, tail = _common_prefix(first, second), _common_prefix(first[::-1], second[::-1])
        end = len(self.text) - tail
        same = self.text[:start] == first[:start] and self.text[end:] == first[len(first) - tail :]
        if first[start : len(first) - tail] != _PROBES[0] or not same or end < start:
            raise self._hidden(index)
        return start, end

    def _with_content(self, index: int, content: str) -> str:
        messages = list(self._row.messages)
        messages[index] = {**messages[index], "content": content}
        return self._render(messages)

    def _prefix(self, count: int, *, add_generation_prompt: bool = False) -> str | None:
        """The first `count` messages rendered, or None where the template refuses them without the rest."""
        try:
            return self._render(self._row.messages[:count], add_generation_prompt=add_generation_prompt)
        except UserError:
            return None

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return render(
            self._tokenizer, messages, self._row.tools, add_generation_prompt=add_generation_prompt, place=self._place
        )

    def _hidden(self, index: int) -> UserError:
        return UserError(
            f"{self._place}: the chat template rewrites message {index + 1}, so that its answer cannot be found in the "
            "text; split the conversation into one row per answer, or use --train_on all"
        )


# Two contents that share no character at either end, and that templates neither trim nor split.
_PROBES = ("QZX one JKV", "WMY two HFB")


def _common_prefix(first: str, second: str) -> int:
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
