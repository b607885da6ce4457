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
    query, key, value, dout = (np.asarray(x, np.float64) for x in (query, key, value, dout))
    group = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, group, axis=2), np.repeat(value, group, axis=2)
    product = scale * np.einsum("btnh,bsnh->bnts", query, key)
    slope = np.ones_like(product)
    if softcap is not None:
        tanh = np.tanh(product / softcap)
        product, slope = softcap * tanh, 1 - tanh**2
    weights = np.exp(np.where(allowed[:, None], product, -np.inf))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    kept = np.ones_like(weights) if kept is None else kept
    out = np.einsum("bnts,bsnh->btnh", weights * kept, value)
    dweights = np.einsum("btnh,bsnh->bnts", dout, value) * kept
    delta = (weights * dweights).sum(-1, keepdims=True)
    dscores = weights * (dweights - delta + (0 if dlse is None else dlse[..., None])) * slope * scale

    def of_group(x):
        batch, length, heads, head_dim = x.shape
        return x.reshape(batch, length, heads // group, group, head_dim).sum(3)

    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0])
    gradients = (
        np.einsum("bnts,bsnh->btnh", dscores, key),
        of_group(np.einsum("bnts,btnh->bsnh", dscores, query)),
        of_group(np.einsum("bnts,btnh->bsnh", weights * kept, dout)),
    )
    return Exact(out, lse, gradients)


@pytest.fixture(scope="session")
def exact():
    """exact_attention(query, key, value, dout, allowed, scale, softcap=None, dlse=None, kept=None) -> Exact."""
    return exact_attention
