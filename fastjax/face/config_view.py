"""`model.config` and the model's output, as people know them from transformers."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from fastjax.errors import UserError

# Settings of transformers that notebooks write and that change nothing here.
_HARMLESS = ("use_cache", "pretraining_tp", "pad_token_id")


class ModelOutput(NamedTuple):
    """logits: [B, T, V] float32."""

    logits: jax.Array


class ConfigView(SimpleNamespace):
    """A model's config.json as attributes; the model itself does not follow what is written into it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HARMLESS and (name not in self.__dict__ or self.__dict__[name] != value):
            raise UserError(
                f"config.{name}={value!r} cannot be honoured: the model is built already; write it into the model "
                "folder's config.json and load it again"
            )
        self.__dict__[name] = value

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return dict(self.__dict__)
