"""The loss of a model, with or without an adapter, on a file of rows."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from fastjax.cli import Options, run_command
from fastjax.devices import note_slow_dtype
from fastjax.errors import NumericsError
from fastjax.settings import setting
from fastjax.train.config import RowConfig, TrainConfig


@dataclasses.dataclass
class EvaluateConfig(RowConfig):
    """What is evaluated on which rows."""

    load_in_4bit: bool | None = setting(None, "read the base in 4 bit; none: as the adapter was trained")


def evaluate(config: EvaluateConfig, options: Options) -> None:
    """Print eval_loss, the number of target tokens and the perplexity; what became of the rows goes to stderr."""
    if config.adapter and not config.model:
        from fastjax.train.parts import model_of

        config = dataclasses.replace(config, model=model_of("", config.adapter))
    config.validate()
    from fastjax.train.mesh import config_mesh
    from fastjax.train.parts import evaluate_model, form_of_base, load_base, open_base
    from fastjax.train.rows import load_rows, set_chat_template

    base = open_base(config.model, config.adapter)
    form = form_of_base(config.adapter, config.load_in_4bit)
    is_4bit = form.quantization is not None or base.checkpoint.quantization is not None
    mesh = config_mesh(config, base.config, "lora", quantized=is_4bit)
    set_chat_template(base, config)
    rows = load_rows(config.data, config, base)
    print(rows.report, file=sys.stderr)
    note_slow_dtype(config.dtype, options.given)
    model = load_base(base, config.dtype, mesh=mesh, adapter=config.adapter, load_in_4bit=config.load_in_4bit)
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
        EvaluateConfig, evaluate, argv, prog="fastjax evaluate", description=__doc__ or "", passed_over=TrainConfig
    )


if __name__ == "__main__":
    sys.exit(main())
