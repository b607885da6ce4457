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
    batch, num_queries, num_heads, _ = query.shape
    group = num_heads // key.shape[2]
    out, lse = np.zeros_like(query), np.zeros((batch, num_heads, num_queries))
    dquery, dkey, dvalue = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    # One matrix at a time: small enough for the cache, and matmul goes through BLAS.
    for b, n in np.ndindex(batch, num_heads):
        q, k, v, do = query[b, :, n], key[b, :, n // group], value[b, :, n // group], dout[b, :, n]
        scores = scale * q @ k.T
        slope = 1.0
        if softcap is not None:
            tanh = np.tanh(scores / softcap)
            scores, slope = softcap * tanh, 1 - tanh**2
        weights = np.exp(np.where(allowed[b], scores, -np.inf))
        total = weights.sum(-1, keepdims=True)
        weights /= np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            lse[b, n] = np.log(total[:, 0])
        share = 1.0 if kept is None else kept[b, n]
        out[b, :, n] = (weights * share) @ v
        dweights = do @ v.T * share
        delta = (weights * dweights).sum(-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse[b, n][:, None]
        dscores = weights * (dweights - delta) * slope * scale
        dquery[b, :, n] = dscores @ k
        dkey[b, :, n // group] += dscores.T @ q
        dvalue[b, :, n // group] += (weights * share).T @ do
    return Exact(out, lse, (dquery, dkey, dvalue))


@pytest.fixture(scope="session")
def exact():
    """exact_attention(query, key, value, dout, allowed, scale, softcap=None, dlse=None, kept=None) -> Exact."""
    return exact_attention
