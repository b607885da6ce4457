"""adapter_config.json and LoraConfig: the table between PEFT's keys and ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastjax.errors import UserError
from fastjax.models.lora_config import LoraConfig
from fastjax.models.values import shown

# Keys that mean the same here and there.
_SHARED = (
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save", "ensure_weight_tying", "bias",
)  # fmt: skip

# Keys of younger versions of PEFT: written only where they say something, so that older ones read the file.
_WRITTEN_IF_SET = ("exclude_modules", "ensure_weight_tying")

# Keys that do not change what a finished adapter computes: notes, and how it was initialised.
_NEUTRAL = frozenset({
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version",
    "init_lora_weights", "megatron_core", "qalora_group_size", "eva_config", "loftq_config", "runtime_config",
})  # fmt: skip

# Ways to initialise that leave the base model alone. The others (PiSSA, OLoRA, CorDA, LoftQ, ...) change its weights,
# and an adapter is then right on the changed base only.
_HARMLESS_INIT = (True, False, None, "gaussian", "eva", "orthogonal")

_TASKS = (None, "CAUSAL_LM")


def config_from_peft(values: Mapping[str, Any], path: Path) -> LoraConfig:
    """The LoraConfig of an adapter_config.json.

    Args:
      values: the file's contents.
      path: the file, for messages.
    Raises: UserError for another kind of adapter, and for a setting that we do not compute; it names key and value.
    """
    peft_type = values.get("peft_type")
    if peft_type != "LORA":
        raise UserError(f"{path}: peft_type={shown(peft_type)} is not supported; adapters of peft_type 'LORA' are")
    if values.get("task_type") not in _TASKS:
        raise UserError(f"{path}: task_type={shown(values['task_type'])} is not supported; CAUSAL_LM adapters are")
    for key, value in values.items():
        if key not in _SHARED and key not in _NEUTRAL and value:
            raise UserError(
                f"{path}: {key}={shown(value)} is not supported, and the adapter would compute something else without "
                "it; merge it with PEFT"
            )
    if values.get("init_lora_weights") not in _HARMLESS_INIT:
        raise UserError(
            f"{path}: init_lora_weights={shown(values['init_lora_weights'])} changed the base model's weights; save "
            "the adapter as plain LoRA with PEFT (path_initial_model_for_weight_conversion), or merge it there"
        )
    if not values.get("target_modules"):
        raise UserError(f"{path}: target_modules={values.get('target_modules')!r} names no module")
    for key in ("r", "lora_alpha", "lora_dropout", "bias"):
        if key in values and values[key] is None:
            raise UserError(f"{path}: {key}=None has no meaning; write its value, or remove the key for PEFT's default")
    known = {key: values[key] for key in _SHARED if values.get(key) is not None}
    for key, kinds in (("target_modules", (str, list)), ("modules_to_save", (list,)), ("rank_pattern", (dict,)),
                       ("alpha_pattern", (dict,)), ("layers_to_transform", (int, list)), ("use_rslora", (bool,)),
                       ("lora_dropout", (int, float)), ("ensure_weight_tying", (bool,)),
                       ("layers_pattern", (str, list)), ("exclude_modules", (str, list)),
                       ("bias", (str,))):  # fmt: skip
        # bool is an int to Python, and true is no number.
        if key in known and (not isinstance(known[key], kinds) or (isinstance(known[key], bool) != (bool in kinds))):
            raise UserError(f"{path}: {key}={shown(known[key])} is not {' or '.join(kind.__name__ for kind in kinds)}")
    try:
        return LoraConfig(**known)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def config_to_peft(config: LoraConfig, target_modules: list[str] | str, base_model_name: str | None) -> dict[str, Any]:
    """The contents of an adapter_config.json for `config`; only keys that PEFT knows.

    Args:
      target_modules: as it is to be written, without our shorthands.
    """
    out: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "revision": None,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    for key in _SHARED:
        value = getattr(config, key)
        if key in _WRITTEN_IF_SET and not value:
            continue
        out[key] = list(value) if isinstance(value, tuple) else value
    out["target_modules"] = target_modules
    # PEFT types lora_alpha as a whole number.
    if float(config.lora_alpha).is_integer():
        out["lora_alpha"] = int(config.lora_alpha)
    return out
