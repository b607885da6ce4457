"""What an adapter was trained over, in the metadata of its weights: PEFT's config has no word for it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.safetensors_header import read_header
from fastjax.models.checkpoint.tensors import quantization_of
from fastjax.models.decoder import CausalLM
from fastjax.models.quant_config import QuantConfig
from fastjax.models.quantized import is_quantized

WEIGHTS_NAME = "adapter_model.safetensors"
_KEY = "base_quantization_config"


@dataclass(frozen=True)
class BaseForm:
    """How base weights are held: those under an adapter, or those that a run loads.

    Attributes:
      quantization: None for weights in 16 or 32 bit.
      dtype: of the values that are quantised, "bfloat16" or "float32"; None is the compute dtype.
    """

    quantization: QuantConfig | None = None
    dtype: str | None = None


def read_base_form(folder: str | os.PathLike[str]) -> BaseForm | None:
    """What the adapter in `folder` was trained over; None if it does not say.

    Raises: UserError if the adapter's file is unsound.
    """
    file = Path(folder) / WEIGHTS_NAME
    text = read_header(file).metadata.get(_KEY) if file.is_file() else None
    if text is None:
        return None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: {_KEY} in its metadata is not JSON: {str(error)[:100]}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{file}: {_KEY} in its metadata is no JSON object")
    if settings.get("load_in_4bit") is False:
        return BaseForm()
    dtype: Any = settings.get("bnb_4bit_compute_dtype")
    known = dtype if dtype in ("bfloat16", "float32") else None
    return BaseForm(QuantConfig.from_hf(settings, f"{file}: {_KEY}"), known)


def base_metadata(model: CausalLM) -> dict[str, str]:
    """The words that `read_base_form` reads, for a file's metadata."""
    settings = quantization_of(model).to_hf(model.dtype.name) if is_quantized(model) else {"load_in_4bit": False}
    return {_KEY: json.dumps(settings)}
