"""load_in_4bit and quantization_config, as transformers' and Unsloth's users give them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError

if TYPE_CHECKING:
    from fastjax.models.checkpoint.checkpoint import Checkpoint
    from fastjax.models.quant_config import QuantConfig


def read_quantization(
    load_in_4bit: bool | None,
    quantization_config: Any,
    checkpoint: "Checkpoint",
    trained_with: "QuantConfig | None",
    *,
    is_adapter: bool,
) -> "QuantConfig | None":
    """How a model is quantised while it loads; None leaves it as it is on disk.

    Args:
      quantization_config: an object with to_dict() or a mapping, bitsandbytes' 4-bit one; or None.
      trained_with: what the adapter that is loaded says of its base.
    Raises: UserError for settings that contradict each other or the checkpoint, or are not computed here.
    """
    from fastjax.models.quant_config import QuantConfig

    config = None
    if quantization_config is not None:
        if load_in_4bit is False:
            raise UserError("load_in_4bit=False with a quantization_config; give one of the two")
        settings = quantization_config
        if not isinstance(settings, Mapping):
            settings = settings.to_dict() if hasattr(settings, "to_dict") else None
        config = QuantConfig.from_hf(settings, "quantization_config")
    on_disk = checkpoint.quantization
    if on_disk is not None:
        if load_in_4bit is False:
            raise UserError(
                f"load_in_4bit=False, and {checkpoint.name} holds 4-bit weights; leave it out, or give the 16-bit model"
            )
        same = config is None or (config.quant_type, config.double_quant) == (on_disk.quant_type, on_disk.double_quant)
        if not same:
            raise UserError(f"quantization_config asks for {config}, and {checkpoint.name} is 4-bit already: {on_disk}")
        return None
    if load_in_4bit is False:
        return None
    if config is not None:
        return config
    if load_in_4bit is None and is_adapter:
        return trained_with
    return trained_with or QuantConfig()
