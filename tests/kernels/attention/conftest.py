"""The truth for attention: softmax, dropout and their gradients written out in float64 numpy."""

from dataclasses import dataclass

import numpy as np
import pytest


@dataclass
class Exact:
    """out [B, T, N, H], lse [B, N, T] (-inf for a query without keys), and the gradients of query, key and value."""

    out: np.ndarray
    lse: np.ndarray
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray]


def exact_attention(query, key, value, dout, allowed, scale, softcap=None, dlse=None, kept=None) -> Exact:
    """Args: allowed [B, T, S] bool; kept [B, N, T, S], what dropout multiplies the weights with."""
    # [B, N, length, H]: matmul goes through BLAS, which einsum does not with batch dims.
    query, key, value, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key, value, dout))
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    product = scale * query @ key.swapaxes(2, 3)
    slope = np.ones_like(product)
    if softcap is not None:
        tanh = np.tanh(product / softcap)
        product, slope = softcap * tanh, 1 - tanh**2
    weights = np.exp(np.where(allowed[:, None], product, -np.inf))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    kept = np.ones_like(weights) if kept is None else kept
    dropped = weights * kept
    dweights = dout @ value.swapaxes(2, 3) * kept
    delta = (weights * dweights).sum(-1, keepdims=True)
    dscores = weights * (dweights - delta + (0 if dlse is None else dlse[..., None])) * slope * scale

    def of_group(x):
        batch, heads, length, head_dim = x.shape
        return x.reshape(batch, heads // group, group, length, head_dim).sum(2)

    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0])
    gradients = (dscores @ key, of_group(dscores.swapaxes(2, 3) @ query), of_group(dropped.swapaxes(2, 3) @ dout))
    dquery, dkey, dvalue = (x.swapaxes(1, 2) for x in gradients)
    return Exact((dropped @ value).swapaxes(1, 2), lse, (dquery, dkey, dvalue))


@pytest.fixture(scope="session")
def exact():
    """exact_attention(query, key, value, dout, allowed, scale, softcap=None, dlse=None, kept=None) -> Exact."""
    return exact_attention
