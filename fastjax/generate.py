"""Answers of a model, with or without an adapter, to one prompt or a file of prompts."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastjax.cli import Options, run_command
from fastjax.devices import note_slow_dtype
from fastjax.errors import UserError
from fastjax.settings import check_all, setting
from fastjax.train.config import TrainConfig

if TYPE_CHECKING:
    from fastjax.train.parts import Base


@dataclasses.dataclass
class GenerateConfig:
    """The model, what it is asked, and how its tokens are chosen."""

    model: str = setting("", "HF folder, hub id or .gguf file of the base model; without it the adapter's own")
    adapter: str | None = setting(None, "adapter folder; its tokenizer and chat template are used if it holds them")
    prompt: str | None = setting(None, "the text to answer")
    prompts: str | None = setting(
        None, 'file of rows {"prompt": text} or {"messages": [...]}: .jsonl, .json, .csv or .parquet'
    )
    chat: bool = setting(False, "put prompts through the chat template (what happens if there is one)")
    raw: bool = setting(False, "take prompts as text to go on with, without the chat template")
    max_new_tokens: int = setting(128, "longest answer, in tokens", minimum=1)
    temperature: float = setting(0.0, "0 takes the most likely token, 1 draws as the model says", minimum=0)
    top_k: int | None = setting(None, "draw from the k most likely tokens; 0 or none keeps all", minimum=0)
    top_p: float | None = setting(None, "draw from the most likely tokens that hold this probability; 1 keeps all")
    min_p: float | None = setting(
        None, "draw from tokens at least this likely beside the most likely one; 0 keeps all", minimum=0
    )
    seed: int = setting(0, "of the draws", minimum=0, below=2**32)
    output: str | None = setting(None, "write one JSON object a prompt to this file, and nothing to stdout")
    batch_size: int = setting(8, "prompts that are answered side by side", minimum=1)
    load_in_4bit: bool | None = setting(None, "read the base in 4 bit; none: as the adapter was trained")
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "dtype of the weights and the activations", later={"float16": "use bfloat16 or float32"}
    )

    def validate(self) -> None:
        """Raises: UserError for a missing, impossible or contradictory setting."""
        check_all(self)
        if not self.model and self.adapter is None:
            raise UserError("model is missing; give the base model as --model or in --config")
        if (self.prompt is None) == (self.prompts is None):
            given = "neither" if self.prompt is None else "both"
            raise UserError(f"{given} of prompt and prompts given; give --prompt TEXT or --prompts FILE")
        if self.chat and self.raw:
            raise UserError("chat and raw are both given; --chat uses the chat template, --raw does not")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie in [0, 1]; 1 or none keeps every token")
        if self.min_p is not None and self.min_p > 1:
            raise UserError(f"min_p={self.min_p} must lie in [0, 1]; 0 or none keeps every token")
        if self.output is not None and (Path(self.output).is_dir() or not Path(self.output).absolute().parent.is_dir()):
            raise UserError(f"output={self.output!r} must name a file in a folder that exists")


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt as it was given, its place for messages, and the ids that generation starts from."""

    given: Any
    place: str
    ids: list[int]


def generate(config: GenerateConfig, options: Options) -> None:
    """Print the answers in the order of the prompts, or write them to `config.output`."""
    config.validate()
    filters = [name for name in ("top_k", "top_p", "min_p") if getattr(config, name) is not None]
    if filters and config.temperature == 0:
        _note(f"temperature=0 takes the most likely token, so {' and '.join(filters)} filters nothing; "
              "--temperature 1 draws as the model says")  # fmt: skip
    from fastjax.train.parts import load_base, model_of, open_base

    base = open_base(model_of(config.model, config.adapter), config.adapter)
    # Every prompt is checked before the weights are read: a mistake in the last row should not cost an hour.
    questions = _questions(config, base)
    note_slow_dtype(config.dtype, options.given)
    model = load_base(base, config.dtype, adapter=config.adapter, load_in_4bit=config.load_in_4bit)
    answers = _answers(config, base, model, questions)
    if config.output is not None:
        _write(Path(config.output), answers, len(questions), options)
        return
    for answer in answers:
        print(json.dumps(answer, ensure_ascii=False) if options.json else answer["text"], flush=True)


def _questions(config: GenerateConfig, base: "Base") -> list[Question]:
    from fastjax.models.generation import check_prompt, length_limit
    from fastjax.train.data import prompt_ids

    chat = config.chat or (bool(base.tokenizer.chat_template) and not config.raw)
    if not (config.chat or config.raw):
        _note("prompts go through the chat template; --raw takes them as text to go on with" if chat else
              "the tokenizer has no chat template, so prompts are text to go on with")  # fmt: skip
    questions = []
    for given, tools, place in _prompts(config):
        try:
            ids = prompt_ids(base.tokenizer, given, chat, tools)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        check_prompt(ids, place, base.config.vocab_size, length_limit(base.config))
        questions.append(Question(given, place, ids))
    return questions


def _prompts(config: GenerateConfig) -> Iterator[tuple[Any, Any, str]]:
    """(prompt or messages, tools, place) of every row."""
    if config.prompts is None:
        yield config.prompt, None, "--prompt"
        return
    from fastjax.train.data.readers import read_rows

    if not Path(config.prompts).is_file():
        raise UserError(f"prompts={config.prompts!r} is not a file; give a .jsonl file with one row a line")
    for row, place in read_rows(config.prompts):
        found = [key for key in ("prompt", "messages") if isinstance(row, dict) and row.get(key) is not None]
        if len(found) != 1 or not isinstance(row[found[0]], str if found[0] == "prompt" else str | list):
            keys = ", ".join(map(str, row)) if isinstance(row, dict) and row else "none"
            raise UserError(
                f'{place}: not a prompt (keys seen: {keys}); a row is {{"prompt": text}} or {{"messages": [...]}}'
            )
        given = row[found[0]]
        if isinstance(given, str) and found[0] == "messages":
            given = _messages_of_text(given, place)
        if found[0] == "messages" and given and isinstance(given[-1], dict) and given[-1].get("role") == "assistant":
            raise UserError(f"{place}: the last message is the assistant's; leave it out, the model writes it")
        yield given, row.get("tools"), place


def _messages_of_text(text: str, place: str) -> Any:
    """CSV keeps lists as JSON text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{place}: messages is a text that is not JSON ({error}); it must be a list") from None


def _answers(config: GenerateConfig, base: "Base", model: Any, questions: list[Question]) -> Iterator[dict[str, Any]]:
    from fastjax.models.generation import generate as generate_ids
    from fastjax.train.parts import eos_token_ids

    eos = eos_token_ids(base)
    for start in range(0, len(questions), config.batch_size):
        batch = questions[start : start + config.batch_size]
        new = generate_ids(
            model,
            [question.ids for question in batch],
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=config.seed,
            eos_token_ids=eos,
        )
        for question, ids in zip(batch, new, strict=True):
            yield {
                "prompt": question.given,
                "text": base.tokenizer.decode(ids, skip_special_tokens=True),
                "num_prompt_tokens": len(question.ids),
                "num_new_tokens": len(ids),
                "finish_reason": "stop" if ids[-1] in eos else "length",
            }


def _write(file: Path, answers: Iterator[dict[str, Any]], num_answers: int, options: Options) -> None:
    """The answers as JSON lines; the file appears whole or not at all."""
    from fastjax.models.checkpoint.files import replace_file

    with replace_file(file) as out:
        for answer in answers:
            out.write((json.dumps(answer, ensure_ascii=False) + "\n").encode())
    if options.json:
        print(json.dumps({"output": str(file), "num_answers": num_answers}))
    else:
        _note(f"wrote {num_answers} answers to {file}")


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastjax.generate`; returns the exit code."""
    return run_command(
        GenerateConfig, generate, argv, prog="fastjax generate", description=__doc__ or "", passed_over=TrainConfig
    )


if __name__ == "__main__":
    sys.exit(main())
