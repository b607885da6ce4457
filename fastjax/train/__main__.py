"""Fine-tune a Llama- or Mistral-family model with LoRA, or in full."""

import json
import sys
from collections.abc import Sequence

from fastjax.cli import Options, run_command
from fastjax.train.config import TrainConfig


def train(config: TrainConfig, options: Options) -> None:
    """One run, from the base model to the saved adapter; with --json only the result goes to stdout."""
    config.validate()
    from fastjax.train.run import run

    if options.json:
        result = run(config, options.given, say=lambda text: print(text, file=sys.stderr))
        print(json.dumps(result.to_dict()))
    else:
        print(run(config, options.given))


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastjax.train`; returns the exit code."""
    return run_command(TrainConfig, train, argv, prog="fastjax train", description=__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
