"""The Mosaic GPU forward and its two backwards against float64, on Hopper GPUs only; lowering and refusals anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.gpu_targets import compile_for
from fastjax.kernels.attention import attention, mosaic_gpu
from fastjax.kernels.attention.blocks import mosaic_tiles
from fastjax.kernels.attention.options import Options

# Relative error of a whole array: rounded weights, outputs and gradients.
TOLERANCE = {"bfloat16": 5e-3, "float16": 7e-4}


@pytest.fixture
def hopper():
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, and this is {device.device_kind}")


def close(found, expected, dtype):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = max(np.linalg.norm(expected), 0.1 * np.sqrt(expected.size))
    assert np.linalg.norm(found - expected) / scale < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "heads", "head_dim", "causal", "dtype"),
    [
        (8, 8, (3, 1), 64, True, "bfloat16"),
        (1000, 1000, (8, 2), 128, True, "bfloat16"),
        (264, 264, (2, 2), 256, True, "float16"),
        (104, 392, (3, 1), 128, False, "float16"),
        (640, 128, (4, 4), 64, False, "bfloat16"),
    ],
)
def test_values_and_gradients(exact, hopper, num_queries, num_keys, heads, head_dim, causal, dtype, return_lse):
    num_heads, num_kv_heads = heads
    shapes = [
        (2, num_queries, num_heads, head_dim),
        *[(2, num_keys, num_kv_heads, head_dim)] * 2,
        (2, num_queries, num_heads, head_dim),
    ]
    keys = jax.random.split(jax.random.key(num_queries), 5)
    query, key, value, dout = (jax.random.normal(k, s).astype(dtype) for k, s in zip(keys[:4], shapes, strict=True))
    dlse = jax.random.normal(keys[4], (2, num_heads, num_queries))
    scale = 1.3 * head_dim**-0.5

    @jax.jit
    def run(query, key, value, dout, dlse):
        def call(*x):
            return attention(*x, causal=causal, scale=scale, return_lse=return_lse, implementation="mosaic_gpu")

        out, vjp = jax.vjp(call, query, key, value)
        return out, vjp((dout, dlse) if return_lse else dout)

    out, gradients = run(query, key, value, dout, dlse)
    allowed = np.tril(np.ones((num_queries, num_keys), bool)) if causal else np.ones((num_queries, num_keys), bool)
    allowed = np.broadcast_to(allowed, (2, num_queries, num_keys))
    expected = exact(query, key, value, dout, allowed, scale, dlse=np.asarray(dlse) if return_lse else None)
    if return_lse:
        out, lse = out
        np.testing.assert_allclose(lse, expected.lse, atol=2e-5)
    for one, two in zip((out, *gradients), (expected.out, *expected.gradients), strict=True):
        assert one.dtype == dtype
        close(one, two, dtype)
    again, _ = run(query, key, value, dout, dlse)
    assert (again[0] if return_lse else again).tobytes() == out.tobytes()


@pytest.mark.parametrize(("shape", "causal"), [((1, 1000, 8, 128), True), ((2, 24, 4, 256), False)])
def test_the_kernel_lowers_for_a_described_hopper_gpu(shape, causal):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin is missing; `make test` installs it")
    from fastjax.kernels.attention.mosaic_gpu_forward import forward_mosaic

    query, key = (jax.ShapeDtypeStruct((*shape[:2], n, shape[3]), jnp.bfloat16) for n in (shape[2], 2))
    options = Options(scale=1.0, causal=causal)
    compiled = compile_for("H200", lambda *x: forward_mosaic(*x, options, mosaic_tiles(shape[3])), query, key, key)
    assert "mosaic" in compiled.as_text()


class Gpu:
    platform, device_kind = "gpu", "NVIDIA A100"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"capability": "8.0"}, "needs compute capability 9.0 (Hopper); NVIDIA A100 has 8.0"),
        ({"cuda": 12080}, "install 12.9.1"),
        ({"dtype": "float32"}, "bfloat16 and float16"),
        ({"head_dim": 80}, "64, 128 and 256, and this one is 80"),
        ({"num_keys": 12}, "multiples of 8, and these are T=16 and S=12"),
        ({"num_keys": 24}, "T=16 and S=24"),
        ({"options": {"window": 4}}, "no window"),
        ({"options": {"softcap": 4.0}}, "no softcap"),
        ({"options": {"dropout_rate": 0.1}}, "no dropout"),
        ({}, None),
        ({"num_keys": 24, "options": {"causal": False}}, None),
    ],
)
def test_what_it_cannot_do(monkeypatch, changes, words):
    monkeypatch.setattr(mosaic_gpu, "target_is_gpu", lambda: True)
    monkeypatch.setattr(mosaic_gpu, "target_device", lambda: Gpu(changes.get("capability", "9.0")))
    monkeypatch.setattr(mosaic_gpu, "_cuda_version", lambda: changes.get("cuda", 13000))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    head_dim = changes.get("head_dim", 64)
    query = jax.ShapeDtypeStruct((1, 16, 4, head_dim), changes.get("dtype", "bfloat16"))
    key = jax.ShapeDtypeStruct((1, changes.get("num_keys", 16), 2, head_dim), query.dtype)
    reason = mosaic_gpu.mosaic_reason(query, key, Options(scale=1.0, **changes.get("options", {})))
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "'mosaic_gpu' needs a Hopper GPU"),
        ({"segment_ids": jnp.ones((1, 8), int)}, "takes no segment_ids"),
        ({"positions": jnp.zeros((1, 8), int)}, "takes no positions"),
        ({"kv_lengths": jnp.ones((1,), int)}, "takes no kv_lengths"),
        ({"interpret": True}, "cannot be interpreted"),
    ],
)
def test_refusals_in_words(settings, words):
    x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=words):
        attention(x, x, x, implementation="mosaic_gpu", **settings)
