"""SwiGLU in plain jnp: the definition of right."""

import jax
import jax.numpy as jnp


def swiglu_reference(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up in float32, rounded once to gate's dtype."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
