"""With output and log-sum-exp saved by name, the backward does not run the forward kernel again."""

import re

import jax
import jax.numpy as jnp
import pytest

from fastjax.gpu_targets import compile_for
from fastjax.kernels.attention import attention


@pytest.mark.parametrize(("names", "times"), [(("attn_out", "attn_lse"), 1), (("attn_out",), 2)])
def test_forward_kernels_of_a_compiled_gradient(names, times):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin is missing; `make test` installs it")
    query = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 32, 1, 16), jnp.bfloat16)

    def loss(query, key):
        def layer(x, _):
            return jnp.sin(attention(x, key, key, implementation="pallas_triton")), None

        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.lax.scan(layer, query, length=3)[0].astype(jnp.float32).sum()

    text = compile_for("H200", jax.grad(loss), query, key).as_text()
    assert len(re.findall(r"custom-call.*attention_forward", text)) == times
    assert len(re.findall(r"custom-call.*attention_dquery", text)) == 1


def test_the_reference_names_its_output():
    x = jnp.ones((1, 4, 2, 8))
    text = str(jax.make_jaxpr(jax.grad(lambda x: attention(x, x, x, implementation="reference").sum()))(x))
    assert "attn_out" in text
