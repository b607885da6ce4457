"""Under a mesh of four CPU devices: values and gradients of one device, and no exchange of activations."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fastjax.kernels.attention import sharded_attention

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from fastjax.kernels.attention import attention, make_tile_bounds, sharded_attention

mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
keys = jax.random.split(jax.random.key(0), 4)
query, key, value, dout = (
    jax.random.normal(k, (2, 40, n, 16)) for k, n in zip(keys, (4, 2, 2, 4))
)
ids = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 2, 2, 3]], 10, axis=1), jnp.int32)
arrays = {"segment_ids": ids, "tile_bounds": make_tile_bounds(ids)}
common = {"dropout_rate": 0.2, "rng": jax.random.key(1), "implementation": "pallas_triton", "interpret": True}

def gradients(call):
    def run(query, key, value, dout, arrays):
        out, vjp = jax.vjp(lambda *x: call(*x, **arrays, **common), query, key, value)
        return out, *vjp(dout)
    return run

expected = jax.jit(gradients(attention))(query, key, value, dout, arrays)
heads, rows = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")), NamedSharding(mesh, P(("data", "fsdp")))
placed = [jax.device_put(x, heads) for x in (query, key, value, dout)] + [jax.device_put(arrays, rows)]
call = lambda *x, **settings: sharded_attention(mesh, *x, **settings)
compiled = jax.jit(gradients(call)).lower(*placed).compile()
for one, two in zip(compiled(*placed), expected):
    np.testing.assert_array_equal(one, two)
text = compiled.as_text()
for word in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
    assert word not in text, word
print("equal")
"""


def test_four_devices_equal_one_without_any_exchange():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


@pytest.mark.parametrize(
    ("rows", "heads", "words"), [(3, 2, "3 rows cannot be split over 2"), (2, 3, "3 key/value heads cannot be split")]
)
def test_uneven_splits_are_refused(rows, heads, words):
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))
    array = jnp.zeros((rows, 4, heads, 16))
    with pytest.raises(ValueError, match=words):
        sharded_attention(mesh, array, array, array)
