"""A model, with its adapter merged in, as a Hugging Face folder."""

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastjax.cli import Options, run_command
from fastjax.errors import UserError
from fastjax.settings import check_all, setting
from fastjax.train.config import TrainConfig

if TYPE_CHECKING:
    from fastjax.models.checkpoint.checkpoint import Checkpoint
    from fastjax.models.decoder import CausalLM


@dataclasses.dataclass
class ExportConfig:
    """What to merge, and where the result goes."""

    model: str = setting("", "HF folder, hub id or .gguf file of the base model; without it the adapter's own")
    adapter: str | None = setting(None, "adapter folder; without one the base itself is written")
    output_dir: str = setting("", "folder of the merged model")
    format: Literal["merged_16bit", "merged_32bit", "merged_4bit", "base_4bit"] = setting(
        "merged_16bit",
        "merged, in the base's own 16-bit dtype (else bfloat16), in float32, or quantised again, which loses small "
        "updates; or the 4-bit base alone, as bitsandbytes keeps it",
    )
    load_in_4bit: bool | None = setting(None, "merge into the base in 4 bit, decoded; none: as the adapter was trained")
    overwrite_output_dir: bool = setting(False, "replace an earlier export in output_dir")

    def validate(self) -> None:
        """Raises: UserError for a missing or impossible setting."""
        check_all(self)
        if not self.model and self.adapter is None:
            raise UserError("model is missing; give it as --model or in --config")
        if self.format == "base_4bit" and self.adapter is not None:
            raise UserError("format=base_4bit writes the base alone, and adapter is given; leave one of the two out")
        if self.format.endswith("4bit") and self.load_in_4bit is False:
            raise UserError(f"format={self.format} with load_in_4bit=False; leave load_in_4bit out")
        if not self.output_dir:
            raise UserError("output_dir is missing; give it as --output_dir or in --config")
        check_export_folder(Path(self.output_dir), self.overwrite_output_dir, [self.model, self.adapter])


def export(config: ExportConfig, options: Options) -> None:
    """Merge and write; the folder appears complete or not at all."""
    config.validate()
    from fastjax.train.parts import load_base, model_of, open_base

    model_name = model_of(config.model, config.adapter)
    # Once more with the name that the adapter gave: what is read must not be replaced.
    check_export_folder(Path(config.output_dir), config.overwrite_output_dir, [model_name, config.adapter])
    base = open_base(model_name, config.adapter)
    four_bit = True if config.format.endswith("4bit") else config.load_in_4bit
    model = load_base(base, _loaded_dtype(base.checkpoint, config), adapter=config.adapter, load_in_4bit=four_bit)
    dtype = write_merged(
        model, base.checkpoint, base.tokenizer, config.output_dir, config.format, overwrite=config.overwrite_output_dir
    )
    if options.json:
        print(json.dumps({"output_dir": config.output_dir, "dtype": dtype}))
    else:
        print(f"wrote {config.output_dir} ({dtype})")


def write_merged(
    model: "CausalLM",
    checkpoint: "Checkpoint",
    tokenizer: Any,
    folder: str | Path,
    format: str,
    *,
    overwrite: bool = False,
) -> str:
    """Merge in float32 with one rounding, and write the HF folder with tokenizer, template and generation_config.

    `model` stays as it is; a merged weight is made when its turn to be written comes.

    Args:
      checkpoint: the base; its 16-bit dtype is that of merged_16bit.
      format: see `ExportConfig`.
    Returns: the name of the dtype written, of a 4-bit model that of its other weights.
    """
    from fastjax.models.checkpoint.save import save_model
    from fastjax.models.lora import has_adapter
    from fastjax.models.quantized import is_quantized

    if format == "merged_4bit":
        if not is_quantized(model):
            raise UserError("format=merged_4bit for a model in 16 bit; load it with load_in_4bit, or use merged_16bit")
        if has_adapter(model):
            warnings.warn(
                "merged_4bit rounds the merged weights to 4 bit again: what the adapter changed by less than a step of "
                "that grid is lost, and the result answers differently from base and adapter. merged_16bit keeps it",
                stacklevel=2,
            )
    dtype = "float32" if format == "merged_32bit" else _sixteen_bit(checkpoint)
    save_model(
        model, folder, dtype=dtype, tokenizer=tokenizer, generation_config=checkpoint.generation_config,
        overwrite=overwrite, form={"merged_4bit": "merged_4bit", "base_4bit": "as_is"}.get(format, "merged"),
    )  # fmt: skip
    return dtype


def check_export_folder(folder: Path, overwrite: bool, sources: Sequence[str | None]) -> None:
    """Raises: UserError for a folder that must not be written: not empty, not an export, or one that is read from."""
    from fastjax.models.checkpoint.files import check_folder, check_replaceable
    from fastjax.models.checkpoint.save import is_saved_model

    check_folder(folder, "output_dir")
    check_replaceable(folder, "output_dir")
    for source in sources:
        if source and os.path.exists(source):
            where = Path(source).resolve()
            if folder.resolve() == where or folder.resolve() in where.parents:
                raise UserError(f"output_dir={str(folder)!r} holds {source}, which is read; choose another folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UserError(
            f"output_dir={str(folder)!r} is not empty; choose another folder, or replace it with --overwrite_output_dir"
        )
    if not is_saved_model(folder):
        raise UserError(
            f"output_dir={str(folder)!r} holds {min(folder.iterdir()).name}, and no model that an export has written; "
            "it is not replaced. Choose another folder"
        )


def _dtypes(checkpoint: "Checkpoint") -> set[str]:
    return {checkpoint.tensors.info(name).dtype for name in checkpoint.tensors.names()}


def _loaded_dtype(checkpoint: "Checkpoint", config: ExportConfig) -> str:
    """The dtype in which the base is read: the one that it was quantised in, else one that holds it exactly."""
    from fastjax.models.base_form import read_base_form

    form = None if config.adapter is None else read_base_form(config.adapter)
    if form is not None and form.dtype is not None and config.load_in_4bit is not False:
        return form.dtype
    if config.format == "base_4bit" and checkpoint.quantization is None:
        return "bfloat16"
    return "bfloat16" if _dtypes(checkpoint) == {"bfloat16"} else "float32"


def _sixteen_bit(checkpoint: "Checkpoint") -> str:
    return "float16" if _dtypes(checkpoint) == {"float16"} else "bfloat16"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastjax.export`; returns the exit code."""
    return run_command(
        ExportConfig, export, argv, prog="fastjax export", description=__doc__ or "", passed_over=TrainConfig
    )


if __name__ == "__main__":
    sys.exit(main())
