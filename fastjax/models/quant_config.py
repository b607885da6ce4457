"""Which weights are 4-bit, and in which form: bitsandbytes' settings, under its names where a file holds them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastjax.errors import UserError
from fastjax.models.values import flag, shown

QUANT_TYPES = ("nf4", "fp4")
_WHERE = "config.json: quantization_config"


@dataclass(frozen=True)
class QuantConfig:
    """How the linear layers of a model are quantised. The embedding and the head stay as they are.

    Attributes:
      quant_type: "nf4" or "fp4".
      double_quant: whether block scales are coded in 8 bits.
      skip_modules: linear layers that are left alone: full names, their beginnings up to a dot, their ends, or regular
        expressions for a beginning (as transformers reads `llm_int8_skip_modules`).
    """

    quant_type: str = "nf4"
    double_quant: bool = True
    skip_modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.quant_type not in QUANT_TYPES:
            raise UserError(f"quant_type={shown(self.quant_type)} is unknown; known: {', '.join(QUANT_TYPES)}")
        names = self.skip_modules
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise UserError(f"skip_modules={shown(names)} must be a list of module names")
        object.__setattr__(self, "skip_modules", tuple(names))
        for name in names:
            try:
                re.compile(_expression(name))
            except (re.error, OverflowError, RecursionError) as error:
                raise UserError(f"skip_modules: {shown(name)} is not a regular expression: {error}") from error

    def skips(self, module: str) -> bool:
        """Whether the module of this full name stays as it is."""
        return any(re.match(_expression(name), module) or module.endswith(name) for name in self.skip_modules)

    @classmethod
    def from_hf(cls, settings: Any, where: str = _WHERE) -> "QuantConfig":
        """Reads the quantization_config of a config.json, or one that is given.

        Args:
          where: what messages call it.
        Raises: UserError unless it is bitsandbytes' 4-bit one with settings that are computed here.
        """
        if not isinstance(settings, Mapping):
            raise UserError(f"{where}={shown(settings)} must be an object")
        method = settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else "unknown")
        if method != "bitsandbytes" or not flag(settings.get("load_in_4bit", False), f"{where}: load_in_4bit"):
            how = "in 8 bit" if settings.get("load_in_8bit") else "without load_in_4bit"
            kind = f"bitsandbytes {how}" if method == "bitsandbytes" else shown(method)
            raise UserError(
                f"{where} is of {kind}; 16- and 32-bit weights and bitsandbytes' 4-bit ones are read. "
                "Give the unquantised model."
            )
        skipped = settings.get("llm_int8_skip_modules") or ()
        if not isinstance(skipped, list | tuple):
            raise UserError(f"{where}: llm_int8_skip_modules={shown(skipped)} must be a list of module names")
        try:
            return cls(
                settings.get("bnb_4bit_quant_type", "fp4"),  # bitsandbytes' own default
                flag(settings.get("bnb_4bit_use_double_quant", False), "bnb_4bit_use_double_quant"),
                skipped,
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def to_hf(self, compute_dtype: str) -> dict[str, Any]:
        """The quantization_config that transformers and bitsandbytes read."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.quant_type,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": compute_dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(self.skip_modules),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_threshold": 6.0,
        }


def _expression(name: str) -> str:
    return rf"(?:{name})(?:(?<=\.)|(?=\.|$))"
