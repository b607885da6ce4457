"""Fine-tune a Llama- or Mistral-family model with LoRA, or in full."""

import json
import sys
from collections.abc import Sequence

from fastjax.cli import Options, run_command
from fastjax.train.config import TrainConfig


def train(config: TrainConfig, options: Options) -> None:
    """One run, from the base model to the saved adapter; with --json only the result goes to stdout."""
    config.validate()
    if config.inspect is not None:
        _inspect(config, options)
        return
    from fastjax.train.run import run

    if options.json:
        result = run(config, options.given, say=lambda text: print(text, file=sys.stderr))
        print(json.dumps(result.to_dict()))
    else:
        print(run(config, options.given))


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
    return run_command(TrainConfig, train, argv, prog="fastjax train", description=__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
