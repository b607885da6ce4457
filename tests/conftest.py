"""Fixtures that every room's tests share: tiny random HF models, and the same weights in a CausalLM."""

import atexit
import os
import shutil
import tempfile

# Tests never need an accelerator; without this, an installed CUDA plugin would complain on machines without one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nothing may ask a model hub; code that tries gets an error at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny programs spend their time in the compiler: it skips what makes code fast, and every process of the session, the
# workers and the commands that tests start, shares what it makes. The controller sets this before the workers start.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastjax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Tokenised data of tests go nowhere else.
os.environ.setdefault("FASTJAX_CACHE", os.environ["JAX_COMPILATION_CACHE_DIR"])

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_hf_model(family: str = "llama", *, seed: int = 0, scale: float = 0.1, **changes: Any) -> Any:
    """A random transformers model in float32 on the CPU; `changes` are config keys over TINY."""
    import torch
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }
    config_class, model_class = classes[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**TINY, **changes})).float().eval()
    # transformers starts biases at 0 and norms at 1, which would hide a missing one.
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean=centre, std=scale)
    return model


def copy_hf_weights(hf_model: Any, config: dict | None = None, dtype: Any = "float32") -> Any:
    """A CausalLM with the weights of a transformers model, copied name by name without fastjax's own loader."""
    import jax.numpy as jnp
    from flax import nnx

    from fastjax.models.config import ModelConfig
    from fastjax.models.decoder import CausalLM

    model_config = ModelConfig.from_hf(config or hf_model.config.to_dict())
    model = CausalLM(model_config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
    for name, tensor in hf_model.state_dict().items():
        if name == "lm_head.weight" and model.lm_head is None:
            continue
        *path, leaf = name.removeprefix("model.").split(".")
        layer = None
        if path[0] == "layers":
            layer = int(path.pop(1))
        module = model
        for attribute in path:
            module = getattr(module, attribute)
        variable = getattr(module, leaf)
        array = jnp.asarray(tensor.float().numpy(), dtype)
        assert array.shape == variable.shape[0 if layer is None else 1 :], name
        variable[...] = array if layer is None else variable[...].at[layer].set(array)
    return model


@pytest.fixture(scope="session")
def tiny_hf():
    """make_hf_model(family="llama", *, seed, scale, **config_changes): a tiny random transformers model."""
    return make_hf_model


@pytest.fixture(scope="session")
def from_hf_model():
    """copy_hf_weights(hf_model, config=None, dtype="float32"): the same weights in a CausalLM."""
    return copy_hf_weights


@pytest.fixture(scope="module")
def optimised():
    """Real models spend their time in the compiled code: the compiler does all it can again."""
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def smollm2_file():
    """SmolLM2-135M-Instruct's GGUF file, or a skip where it is not."""
    named = os.environ.get("FASTJAX_SMOLLM2")
    files = [Path(named)] if named else sorted((ROOT / ".cache/smollm2").glob("*.gguf"))
    if not files or not files[0].is_file():
        pytest.skip("SmolLM2 is not here; `make model` fetches it, FASTJAX_SMOLLM2 names another place")
    return files[0]
