"""The loss of a model, with or without an adapter, on a file of rows."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from fastjax.cli import Options, run_command
from fastjax.devices import note_slow_dtype
from fastjax.errors import NumericsError
from fastjax.train.config import RowConfig, TrainConfig


def evaluate(config: RowConfig, options: Options) -> None:
    """Print eval_loss, the number of target tokens and the perplexity; what became of the rows goes to stderr."""
    if config.adapter and not config.model:
        from fastjax.train.parts import model_of

        config = dataclasses.replace(config, model=model_of("", config.adapter))
    config.validate()
    from fastjax.models.checkpoint.load import load_model
    from fastjax.models.peft_io import load_adapter
    from fastjax.train.mesh import make_mesh
    from fastjax.train.parts import evaluate_model, load_rows, open_base

    mesh = make_mesh(config.data_parallel_size)
    base = open_base(config.model, config.adapter)
    rows = load_rows(config.data, config, base)
    print(rows.report, file=sys.stderr)
    note_slow_dtype(config.dtype, options.given)
    model = load_model(base.checkpoint, config.dtype, mesh)
    if config.adapter is not None:
        load_adapter(model, config.adapter)
    result = evaluate_model(model, rows, config.per_device_eval_batch_size, mesh)
    if not math.isfinite(result.loss):
        raise NumericsError(f"eval_loss is {result.loss}; the model's weights, or the adapter's, are not finite")
    perplexity = math.exp(result.loss) if result.loss < 700 else math.inf
    if options.json:
        values = {"eval_loss": result.loss, "num_target_tokens": result.num_target_tokens, "perplexity": perplexity}
        print(json.dumps({**values, "data": rows.report.to_dict()}))
    else:
        print(f"eval_loss={result.loss:.6f} num_target_tokens={result.num_target_tokens} perplexity={perplexity:.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastjax.evaluate`; returns the exit code."""
    return run_command(
        RowConfig, evaluate, argv, prog="fastjax evaluate", description=__doc__ or "", passed_over=TrainConfig
    )


if __name__ == "__main__":
    sys.exit(main())
