"""Token ids as people have them: lists, numpy, jax or torch arrays, or a tokenizer's mapping of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastjax.errors import UserError


def is_token_ids(value: Any) -> bool:
    """Whether this is ids, not text or messages: a mapping with input_ids, an array, or (nested) lists of numbers."""
    if isinstance(value, Mapping):
        return "input_ids" in value
    if isinstance(value, list | tuple):
        return len(value) > 0 and not isinstance(value[0], str | Mapping) and is_token_ids(value[0])
    return isinstance(value, int | np.integer) or hasattr(value, "__array__")


def read_token_ids(input_ids: Any, attention_mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """(ids [B, T] int32, real [B, T] bool) of one row or a batch; a mapping brings its own attention_mask.

    Raises: UserError for what is not a rectangle of whole numbers, and for a mask of another shape.
    """
    if isinstance(input_ids, Mapping):
        if attention_mask is None:
            attention_mask = input_ids.get("attention_mask")
        input_ids = input_ids["input_ids"]
    ids = _rectangle("input_ids", input_ids)
    real = np.ones(ids.shape, bool) if attention_mask is None else _rectangle("attention_mask", attention_mask) != 0
    if real.shape != ids.shape:
        raise UserError(f"attention_mask has shape {real.shape}, input_ids {ids.shape}; they must be equal")
    return ids, real


def _rectangle(name: str, value: Any) -> np.ndarray:
    """[B, T] int32; torch's tensors are known by their methods, torch itself is never imported."""
    try:
        array = np.asarray(_on_host(value))
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind == "b" and name == "attention_mask":
        array = array.astype(np.int32)
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}" if array.dtype.kind != "O" else "rows of unequal length"
        raise UserError(
            f"{name} is {found}; give whole numbers, one row [T] or a batch [B, T], padded to one length with an "
            "attention_mask (tokenizer(texts, padding=True, return_tensors='np') makes both)"
        )
    return np.atleast_2d(array).astype(np.int32)


def _on_host(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_on_host(item) for item in value] if any(hasattr(item, "detach") for item in value) else value
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value
