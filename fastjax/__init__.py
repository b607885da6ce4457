"""fastjax: fast, memory-lean fine-tuning of Llama- and Mistral-family language models in JAX.

Importing this module is cheap: each public name is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

from fastjax.version import __version__

if TYPE_CHECKING:
    from fastjax.api import FastLanguageModel, is_bfloat16_supported
    from fastjax.face.sft_config import SFTConfig
    from fastjax.face.sft_trainer import SFTTrainer, train_on_responses_only

__all__ = [
    "FastLanguageModel", "SFTConfig", "SFTTrainer", "__version__", "is_bfloat16_supported", "train_on_responses_only",
]  # fmt: skip

_HOMES = {
    "FastLanguageModel": "fastjax.api",
    "SFTConfig": "fastjax.face.sft_config",
    "SFTTrainer": "fastjax.face.sft_trainer",
    "is_bfloat16_supported": "fastjax.api",
    "train_on_responses_only": "fastjax.face.sft_trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'fastjax' has no attribute {name!r}")
    from fastjax.face.refusals import MODULE_NAMES, missing

    raise missing("module 'fastjax'", name, MODULE_NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
