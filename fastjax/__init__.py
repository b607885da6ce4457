"""fastjax: fast, memory-lean fine-tuning of Llama- and Mistral-family language models in JAX.

Importing this module is cheap: each public name is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastjax.api import FastLanguageModel, SFTTrainer
    from fastjax.sft_config import SFTConfig

__all__ = ["FastLanguageModel", "SFTConfig", "SFTTrainer", "__version__"]
__version__ = "0.1.0"


_HOMES = {"FastLanguageModel": "fastjax.api", "SFTTrainer": "fastjax.api", "SFTConfig": "fastjax.sft_config"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fastjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
