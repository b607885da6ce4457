"""fastjax: fast, memory-lean fine-tuning of Llama- and Mistral-family language models in JAX.

Importing this module is cheap: each public name is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastjax.api import FastLanguageModel, SFTConfig, SFTTrainer

__all__ = ["FastLanguageModel", "SFTConfig", "SFTTrainer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("FastLanguageModel", "SFTConfig", "SFTTrainer"):
        from fastjax import api

        return getattr(api, name)
    raise AttributeError(f"module 'fastjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
