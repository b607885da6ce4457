"""The rotary settings of HF's config.json, in every spelling, to a RopeConfig and back."""

from collections.abc import Mapping
from typing import Any

from fastjax.errors import UserError
from fastjax.models.rope import ROPE_TYPES, RopeConfig
from fastjax.models.values import flag, number, same, shown, whole

# Numbers under rope_parameters with the least and greatest value that has a meaning. The ends lie far beyond any model
# and keep float32 frequencies finite.
_RANGES: dict[str, tuple[float, float]] = {
    "factor": (1, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (0, 1e3),
    "mscale_all_dim": (0, 1e3),
}

_KEYS = frozenset(_RANGES) | {
    "type", "rope_type", "rope_theta", "original_max_position_embeddings", "truncate", "partial_rotary_factor",
    "finetuned",
}  # fmt: skip

_REQUIRED = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "default": ()}


def read_rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """The rotary settings of a config.json.

    A yarn factor that is missing or null is max_position_embeddings / original_max_position_embeddings. (transformers 5
    does so for null and refuses a missing one; there is no other value that it could be.)

    Raises: UserError for an unknown type or key, and for values of the wrong type or outside their range.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = {} if config.get(name) is None else config[name]
    where = f"config.json: {name}"
    if not isinstance(parameters, Mapping):
        raise UserError(f"{where}={shown(parameters)} is not an object with a rope_type")
    unknown = sorted(set(parameters) - _KEYS)
    if unknown:
        raise UserError(f"{where} has the unknown key {shown(unknown[0])}; known: {', '.join(sorted(_KEYS))}")
    if not same(parameters.get("partial_rotary_factor", 1), 1):
        raise UserError(f"{where}.partial_rotary_factor must be 1; partial rotation is not supported")
    given = {key: value for key, value in parameters.items() if value is not None}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UserError(f"config.json: rope type {shown(rope_type)} is not supported; known: {', '.join(ROPE_TYPES)}")
    theta = _theta(config, given, where)
    values = {key: number(given[key], f"{where}.{key}", *_RANGES[key]) for key in _RANGES if key in given}
    truncate = flag(given.get("truncate", True), f"{where}.truncate")
    stated = _original(config, given, where)
    original = max_position_embeddings if stated is None else stated
    if rope_type == "default":
        return RopeConfig(rope_theta=theta)
    if rope_type == "yarn" and "factor" not in values and stated is not None:
        derived = f"{where}.factor (max_position_embeddings / original_max_position_embeddings)"
        values["factor"] = number(max_position_embeddings / stated, derived, *_RANGES["factor"])
    for key in _REQUIRED.get(rope_type, ("factor",)):
        if key not in values:
            raise UserError(f"{where} of type {rope_type!r} needs a number for {key!r}")
    if rope_type == "dynamic":
        original = max_position_embeddings  # transformers stretches from there, whatever else the file says
    rope = RopeConfig(
        rope_type=rope_type,
        rope_theta=theta,
        original_max_position_embeddings=original,
        truncate=truncate,
        **values,
    )
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise UserError(
            f"{where}: low_freq_factor={rope.low_freq_factor} must be below high_freq_factor={rope.high_freq_factor}"
        )
    if rope_type == "yarn" and rope.beta_slow > rope.beta_fast:
        raise UserError(f"{where}: beta_slow={rope.beta_slow} must not be above beta_fast={rope.beta_fast}")
    return rope


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The settings as rope_parameters."""
    out: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta}
    if rope.rope_type == "default":
        return out
    out["factor"] = rope.factor
    if rope.rope_type in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.rope_type == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.rope_type == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {k: getattr(rope, k) for k in ("attention_factor", "mscale", "mscale_all_dim")}
        out |= {k: v for k, v in optional.items() if v is not None}
    return out


def _theta(config: Mapping[str, Any], given: Mapping[str, Any], where: str) -> float:
    # At 1 every frequency would be the same, and yarn divides by log(theta).
    read = [
        number(values["rope_theta"], f"{place}rope_theta", 1, 1e30, above=True)
        for values, place in ((given, f"{where}."), (config, "config.json: "))
        if values.get("rope_theta") is not None
    ]
    return read[0] if read else 10000.0


def _original(config: Mapping[str, Any], given: Mapping[str, Any], where: str) -> int | None:
    key = "original_max_position_embeddings"
    read = [
        whole(values[key], f"{place}{key}")
        for values, place in ((config, "config.json: "), (given, f"{where}."))
        if values.get(key) is not None
    ]
    return read[0] if read else None
