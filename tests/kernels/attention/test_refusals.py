"""What attention refuses, and in which words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.attention import attention, cudnn
from fastjax.kernels.attention.options import Options


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": (1, 4, 3, 8), "value": (1, 4, 3, 8)}, "not a multiple of 3"),
        ({"value": (1, 5, 2, 8)}, r"\[B, S, K, H\]"),
        ({"layer": 0}, r"\[L, B, S, K, H\] \(with layer\)"),
        ({"key": (1, 4, 2, 6), "value": (1, 4, 2, 6)}, "head size"),
        ({"window": 0}, "window=0"),
        ({"scale": 0.0}, "scale=0.0 must be above 0"),
        ({"dropout_rate": 1.0}, r"dropout_rate=1.0 must lie in \[0, 1\)"),
        ({"dropout_rate": 0.1}, "needs rng"),
        ({"segment_ids": jnp.zeros((1, 3), int)}, r"segment_ids \(1, 3\)"),
        ({"tile_bounds": jnp.zeros((1, 4, 4), int)}, r"make_tile_bounds\(segment_ids\)"),
        ({"positions": jnp.zeros((1, 3), int)}, "positions"),
        ({"kv_lengths": jnp.zeros((2,), int)}, "kv_lengths"),
        ({"implementation": "cudnnn"}, "known: cudnn, mosaic_gpu, pallas_triton, reference"),
    ],
)
def test_bad_input_is_named(changes, words):
    arrays = {"query": (1, 4, 4, 8), "key": (1, 4, 2, 8), "value": (1, 4, 2, 8)}
    shapes = {name: changes.get(name, shape) for name, shape in arrays.items()}
    settings = {name: value for name, value in changes.items() if name not in arrays}
    with pytest.raises(ValueError, match=words):
        attention(*(jnp.zeros(shape) for shape in shapes.values()), **settings)


def test_unequal_dtypes_and_lengths_are_named():
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="query is bfloat16, key float32 and value float32"):
        attention(x.astype(jnp.bfloat16), x, x)
    with pytest.raises(ValueError, match="got T=3, S=4"):
        attention(x[:, :3], x, x, segment_ids=jnp.ones((1, 3), int))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"implementation": "pallas_triton"}, "needs an NVIDIA GPU.*interpret=True"),
        ({"implementation": "cudnn"}, "'cudnn' needs an NVIDIA GPU"),
        ({"implementation": "cudnn", "positions": jnp.zeros((1, 4), int)}, "takes no positions"),
        ({"implementation": "cudnn", "kv_lengths": jnp.zeros((1,), int)}, "takes no kv_lengths"),
        ({"implementation": "cudnn", "return_lse": True}, "no log-sum-exp"),
        ({"implementation": "cudnn", "segment_ids": jnp.ones((1, 4), int)}, "needs max_segments"),
    ],
)
def test_a_named_implementation_that_cannot_says_why(settings, words):
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(NotImplementedError, match=words):
        attention(x, x, x, **settings)


def test_heads_and_dtypes_that_the_kernels_do_not_take():
    wide, bytes_ = jnp.zeros((1, 4, 2, 320)), jnp.zeros((1, 4, 2, 8), jnp.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="head sizes up to 256, and this one is 320"):
        attention(wide, wide, wide, implementation="pallas_triton", interpret=True)
    with pytest.raises(NotImplementedError, match="query is float8_e4m3fn"):
        attention(bytes_, bytes_, bytes_, implementation="pallas_triton", interpret=True)
    with pytest.raises(NotImplementedError, match="key and value of one layer"):
        attention(wide, wide[None], wide[None], layer=0, implementation="cudnn")


class Gpu:
    platform, device_kind = "gpu", "NVIDIA A100"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "query", "num_keys", "options", "is_packed", "words"),
    [
        ("9.0", ((1, 4, 2, 8), "float32"), 4, {}, False, "bfloat16 and float16"),
        ("8.0", ((1, 4, 2, 256), "bfloat16"), 4, {}, False, "up to 128 on this GPU"),
        ("9.0", ((1, 4, 2, 12), "bfloat16"), 4, {}, False, "multiples of 8"),
        ("9.0", ((1, 4, 2, 8), "bfloat16"), 5, {}, False, "T=4 and S=5 must be equal"),
        ("9.0", ((1, 4, 2, 8), "bfloat16"), 4, {"window": 2, "causal": False}, False, "window with a causal mask"),
        ("9.0", ((1, 4, 2, 8), "bfloat16"), 4, {"softcap": 2.0}, False, "soft cap"),
        ("9.0", ((1, 4, 2, 8), "bfloat16"), 4, {"dropout_rate": 0.1}, False, "drop other weights"),
        ("8.0", ((1, 4, 2, 8), "bfloat16"), 4, {}, True, "from compute capability 9.0 on; NVIDIA A100 has 8.0"),
        ("9.0", ((1, 4, 2, 8), "bfloat16"), 4, {}, False, None),
    ],
)
def test_what_cudnn_cannot_do(monkeypatch, capability, query, num_keys, options, is_packed, words):
    monkeypatch.setattr(cudnn, "target_is_gpu", lambda: True)
    monkeypatch.setattr(cudnn, "target_device", lambda: Gpu(capability))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn._jax_module(), "check_cudnn_version", lambda: 91000)
    array = jax.ShapeDtypeStruct(*query)
    key = jax.ShapeDtypeStruct((1, num_keys, *array.shape[2:]), array.dtype)
    reason = cudnn.cudnn_reason(array, key, Options(scale=1.0, **options), is_packed=is_packed)
    assert reason is None if words is None else words in reason


def test_a_gpu_without_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "target_is_gpu", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(cudnn._jax_module(), "check_cudnn_version", missing)
    array = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.bfloat16)
    reason = cudnn.cudnn_reason(array, array, Options(scale=1.0), is_packed=False)
    assert reason == "needs cuDNN (cuDNN is not detected.)"


def test_documents_as_cudnn_takes_them():
    ids = np.array(
        [[4, 4, 2, 2, 2, 9, 0, 0], [0, 1, 1, 0, 3, 3, 3, 3], [1, 2, 3, 4, 4, 4, 4, 4], [1, 1, 2, 2, 1, 1, 0, 0]]
    )
    offsets, lengths, is_right = jax.jit(cudnn._documents, static_argnums=1)(ids, 3)
    assert offsets.tolist()[:2] == [[0, 2, 5, -1], [1, 4, -1, -1]]
    assert lengths.tolist()[:2] == [[2, 3, 1], [2, 4, -1]]
    # The third row has a document too many, the last one in two pieces.
    assert is_right.tolist() == [True, True, False, False]
