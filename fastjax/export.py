"""A model, with its adapter merged in, as a Hugging Face folder."""

import dataclasses
import json
import os
import sys
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
    format: Literal["merged_16bit", "merged_32bit"] = setting(
        "merged_16bit",
        "dtype of the written weights: the base's own 16-bit one, else bfloat16; or float32",
        later={"merged_4bit": "use merged_16bit"},
    )
    overwrite_output_dir: bool = setting(False, "replace an earlier export in output_dir")

    def validate(self) -> None:
        """Raises: UserError for a missing or impossible setting."""
        check_all(self)
        if not self.model and self.adapter is None:
            raise UserError("model is missing; give it as --model or in --config")
        if not self.output_dir:
            raise UserError("output_dir is missing; give it as --output_dir or in --config")
        check_export_folder(Path(self.output_dir), self.overwrite_output_dir, [self.model, self.adapter])


def export(config: ExportConfig, options: Options) -> None:
    """Merge and write; the folder appears complete or not at all."""
    config.validate()
    from fastjax.models.checkpoint.load import load_model
    from fastjax.models.peft_io import load_adapter
    from fastjax.train.parts import model_of, open_base

    model_name = model_of(config.model, config.adapter)
    # Once more with the name that the adapter gave: what is read must not be replaced.
    check_export_folder(Path(config.output_dir), config.overwrite_output_dir, [model_name, config.adapter])
    base = open_base(model_name, config.adapter)
    model = load_model(base.checkpoint, "bfloat16" if _is_bfloat16(base.checkpoint) else "float32")
    if config.adapter is not None:
        load_adapter(model, config.adapter)
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
    keep: bool = False,
    overwrite: bool = False,
) -> str:
    """Merge in float32 with one rounding, and write the HF folder with tokenizer, template and generation_config.

    Args:
      checkpoint: the base; its 16-bit dtype is that of merged_16bit.
      keep: leave `model` as it is, at the price of a second copy of every adapted weight.
    Returns: the name of the dtype written.
    """
    from fastjax.models.checkpoint.save import save_model
    from fastjax.models.lora import has_adapter
    from fastjax.models.merge import merge_lora

    dtype = "float32" if format == "merged_32bit" else _sixteen_bit(checkpoint)
    if has_adapter(model):
        # In float32 where the 16-bit dtype is not the weights' own, so that writing is the one rounding.
        merged_dtype = None if dtype == model.embed_tokens.weight.dtype.name else "float32"
        model = merge_lora(model, merged_dtype, keep=keep)
    save_model(
        model, folder, dtype=dtype, tokenizer=tokenizer, generation_config=checkpoint.generation_config,
        overwrite=overwrite,
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


def _is_bfloat16(checkpoint: "Checkpoint") -> bool:
    return _dtypes(checkpoint) == {"bfloat16"}


def _sixteen_bit(checkpoint: "Checkpoint") -> str:
    return "float16" if _dtypes(checkpoint) == {"float16"} else "bfloat16"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fastjax.export`; returns the exit code."""
    return run_command(
        ExportConfig, export, argv, prog="fastjax export", description=__doc__ or "", passed_over=TrainConfig
    )


if __name__ == "__main__":
    sys.exit(main())
