"""load_in_4bit and quantization_config, as transformers' and Unsloth's users give them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.settings import nearest

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

    config: QuantConfig | None = None
    if quantization_config is not None:
        if load_in_4bit is False:
            raise UserError("load_in_4bit=False with a quantization_config; give one of the two")
        config = _given_config(quantization_config)
    on_disk = checkpoint.quantization
    if on_disk is not None:
        if load_in_4bit is False:
            raise UserError(
                f"load_in_4bit=False, and {checkpoint.name} holds 4-bit weights; leave it out, or give the 16-bit model"
            )
        same = config is None or (config.quant_type, config.double_quant) == (on_disk.quant_type, on_disk.double_quant)
        if config is not None and config.skip_modules:
            same = same and set(config.skip_modules) == set(on_disk.skip_modules)
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


_KNOWN = (
    "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
    "llm_int8_skip_modules", "load_in_4bit", "load_in_8bit", "quant_method", "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "_load_in_4bit", "_load_in_8bit",
)  # fmt: skip


def _given_config(given: Any) -> "QuantConfig":
    """Raises: UserError for what is no 4-bit BitsAndBytesConfig, or has a setting that is not known or computed."""
    from fastjax.models.quant_config import QuantConfig

    settings = given if isinstance(given, Mapping) else given.to_dict() if hasattr(given, "to_dict") else None
    if settings is None:
        raise UserError(f"quantization_config={given!r} must be a BitsAndBytesConfig, or its settings as a dict")
    for key in settings:
        if key not in _KNOWN:
            raise UserError(f"quantization_config: {key!r} is no setting of BitsAndBytesConfig{nearest(key, _KNOWN)}")
    compute = str(settings.get("bnb_4bit_compute_dtype")).removeprefix("torch.")
    if compute == "float16":
        raise UserError(
            "quantization_config: bnb_4bit_compute_dtype=float16: there is no loss scaling here, and every supported "
            "card has bfloat16; leave it out. The model computes in from_pretrained's dtype"
        )
    return QuantConfig.from_hf({"load_in_4bit": True, **settings}, "quantization_config")
