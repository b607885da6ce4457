"""Fine-tune a Llama- or Mistral-family model with LoRA, or in full."""

import json
import sys
from collections.abc import Sequence

from fastjax.cli import Options, as_known_error, run_command
from fastjax.hosts.connect import finish, session
from fastjax.train.config import TrainConfig


def train(config: TrainConfig, options: Options) -> None:
    """One run, from the base model to the saved adapter; with --json only the result goes to stdout."""
    config.validate()
    if config.inspect is not None:
        _inspect(config, options)
        return
    with session(config.place, _explain):
        _run(config, options)


def _run(config: TrainConfig, options: Options) -> None:
    from fastjax.train.run import run

    if options.json:
        result = run(config, options.given, say=lambda text: print(text, file=sys.stderr))
        print(json.dumps(result.to_dict()))
    else:
        print(run(config, options.given))


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and what to tell other processes of it."""
    known = as_known_error(error) if isinstance(error, Exception) else None
    if known is not None:
        return known.exit_code, str(known)
    return (130, "interrupted") if isinstance(error, KeyboardInterrupt) else (1, f"{type(error).__name__}: {error}")


def _inspect(config: TrainConfig, options: Options) -> None:
    """The rows that a run would train on, and what became of all of them; nothing is trained."""
    from fastjax.train.inspect_html import write_inspection
    from fastjax.train.inspect_rows import inspect_run, print_inspection

    found = inspect_run(config)
    if config.html is not None:
        write_inspection(found, config.html)
        print(f"wrote {config.html}", file=sys.stderr)
    if options.json:
        print(json.dumps(found.to_dict()))
    elif config.html is None:
        print_inspection(found)
    else:
        print(found.report)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastjax.train`; returns the exit code."""
    code = run_command(TrainConfig, train, argv, prog="fastjax train", description=__doc__ or "")
    return finish(code, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
