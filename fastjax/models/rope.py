"""Rotary position embedding: inverse frequencies of every supported scaling, angles, rotation. All in float32.

angle[t, i] = position_t * inv_freq[i],   i = 0 .. H/2 - 1
(x1, x2)    = the two halves of a head
rotated     = (x1 cos - x2 sin, x2 cos + x1 sin) * attention_factor on cos and sin
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.errors import UserError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """One model's rotary embedding, with the names that config.json uses.

    Attributes:
      rope_type: one of ROPE_TYPES.
      rope_theta: base of the geometric series of wavelengths.
      factor: how far the context is stretched (all types but "default").
      original_max_position_embeddings: context length before stretching, in tokens ("llama3", "yarn"; for "dynamic"
        the length from which the base grows).
      low_freq_factor, high_freq_factor: borders of the blend ("llama3").
      beta_fast, beta_slow, truncate: borders of the ramp ("yarn").
      attention_factor: multiplies cos and sin ("yarn"); None means it follows from factor and the mscale pair.
      mscale, mscale_all_dim: see attention_factor ("yarn").
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def magnitude(self) -> float:
        """The factor on cos and sin."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return _yarn_magnitude(self.factor, self.mscale) / _yarn_magnitude(self.factor, self.mscale_all_dim)
        return _yarn_magnitude(self.factor, 1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies in radians a token, before any growth with the length ("dynamic").

    Args:
      head_dim: H, even.
    Returns: [H/2] float32.
    Raises: UserError if head_dim is odd or the type unknown.
    Source: RoPE arXiv:2104.09864; YaRN arXiv:2309.00071, section 3.2; the rules of "llama3" as in Meta's reference
      code; figures checked against transformers.
    """
    if head_dim % 2 != 0:
        raise UserError(f"head_dim={head_dim} is odd; rotary embedding turns pairs, so it has to be even")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (1.0 / np.power(np.float32(rope.rope_theta), exponents)).astype(np.float32)
    match rope.rope_type:
        case "default" | "dynamic":
            return inv_freq
        case "linear":
            return (inv_freq / np.float32(rope.factor)).astype(np.float32)
        case "llama3":
            return _llama3(rope, inv_freq)
        case "yarn":
            return _yarn(rope, inv_freq, head_dim)
    raise UserError(f"rope_type={rope.rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}")


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array, valid: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every angle.

    Args:
      positions: [B, T] int, position of each token in its document.
      valid: [B, T] bool, tokens that count for the length that "dynamic" reads; None means all.
    Returns: two [B, T, H/2] float32, the magnitude included.
    """
    inv_freq = jnp.asarray(inverse_frequencies(rope, head_dim))
    if rope.rope_type == "dynamic":
        inv_freq = _dynamic(rope, head_dim, inv_freq, positions, valid)
    # Positions are whole numbers below 2^24, exact in float32; in bfloat16 257 would already become 256.
    angles = positions.astype(jnp.float32)[..., None] * inv_freq
    magnitude = rope.magnitude()
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates every head of x.

    Args:
      x: [B, T, N, H] float.
      cos, sin: [B, T, H/2] float32.
    Returns: [B, T, N, H] in x's dtype; computed in float32, rounded once.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / inv_freq
    original = rope.original_max_position_embeddings
    long, short = original / rope.low_freq_factor, original / rope.high_freq_factor
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    stretched = np.where(wavelength > long, inv_freq / rope.factor, inv_freq)
    return np.where((wavelength <= long) & (wavelength >= short), blended, stretched).astype(np.float32)


def _yarn(rope: RopeConfig, inv_freq: np.ndarray, head_dim: int) -> np.ndarray:
    def dim_of(rotations: float) -> float:
        context = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(rope.rope_theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp's width divides below
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)).astype(np.float32)


def _dynamic(
    rope: RopeConfig, head_dim: int, inv_freq: jax.Array, positions: jax.Array, valid: jax.Array | None
) -> jax.Array:
    # NTK scaling grows the base with the longest row of the batch, as transformers does.
    positions = positions if valid is None else jnp.where(valid, positions, 0)
    length = jnp.max(positions) + 1
    original = rope.original_max_position_embeddings
    growth = rope.factor * jnp.maximum(length, original).astype(jnp.float32) / original - (rope.factor - 1)
    base = rope.rope_theta * growth ** (head_dim / (head_dim - 2))
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return jnp.where(length > original, 1.0 / base**exponents, inv_freq)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
