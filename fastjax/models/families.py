"""The model families this package computes, by HF's model_type."""

from typing import Any

from fastjax.errors import UserError
from fastjax.models.family import Family
from fastjax.models.llama import LLAMA
from fastjax.models.mistral import MISTRAL

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL)}


def family_of(model_type: Any) -> Family:
    """The family of a model_type.

    Raises: UserError if there is none; it names the type and the known ones.
    """
    if model_type not in FAMILIES:
        raise UserError(f"config.json: model_type={model_type!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
