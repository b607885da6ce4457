"""Folders that transformers and bitsandbytes wrote, read byte for byte."""

import jax
import numpy as np
import pytest

from fastjax.kernels.nf4 import QuantizedWeight
from fastjax.models.checkpoint.load import load_model
from fastjax.models.quantized import MixedWeight, quantized_linears

NAMES = ("nested", "skipped", "fp4", "head", "tied", "mistral")


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_is_that_of_the_file_and_the_logits_are_those_of_the_decoded_twin(
    name, case, ids, logits, packed_tensors, weight_of, same_fields
):
    made = case(name)
    model = load_model(str(made.folder), "float32")
    in_file = packed_tensors(made.folder)
    assert len(in_file) > 6
    for weight, fields in in_file.items():
        same_fields(weight_of(model, weight), fields)
    for weight, parameter in made.twin.named_parameters():
        if weight.endswith("proj.weight") and weight not in in_file:
            kept = weight_of(model, weight)
            assert isinstance(kept, jax.Array)
            np.testing.assert_array_equal(kept, parameter.detach().numpy())
    np.testing.assert_allclose(logits(model, ids), logits(made.twin, ids), atol=1e-4, rtol=0)


def test_the_logits_are_those_of_transformers_and_bitsandbytes(case, ids, logits):
    # In float32 throughout: bitsandbytes decodes to the dtype that it computes in, whatever was quantised.
    made = case("nested")
    ours = logits(load_model(str(made.folder), "float32"), ids)
    np.testing.assert_allclose(ours, logits(made.theirs, ids), atol=1e-4, rtol=0)


def test_layers_that_are_left_alone_share_a_stack_with_the_others(case):
    model = load_model(str(case("skipped").folder), "float32")
    up, query = model.layers.mlp.up_proj.weight.get_value(), model.layers.self_attn.q_proj.weight.get_value()
    assert isinstance(up, MixedWeight) and up.is_quantized == (True, False, True)
    assert isinstance(query, MixedWeight) and query.is_quantized == (False, True, True)
    assert up.dense.shape == (1, 160, 96) and up.quantized.stack == (2,)
    assert isinstance(model.layers.self_attn.k_proj.weight.get_value(), QuantizedWeight)


def test_a_list_without_lm_head_has_it_quantised(case):
    model = load_model(str(case("head").folder), "float32")
    assert ("lm_head",) in quantized_linears(model) and ("layers", "mlp", "up_proj") not in quantized_linears(model)


def test_a_model_in_shards(tiny_hf, quantize_hf, ids, logits, tmp_path):
    theirs = quantize_hf(tiny_hf(hidden_size=64, intermediate_size=128), tmp_path / "shards", shards=True)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3
    shards = load_model(str(tmp_path / "shards"), "float32")
    np.testing.assert_allclose(logits(shards, ids), logits(theirs, ids), atol=1e-4, rtol=0)


def test_bfloat16_computes_with_the_same_bytes(case, ids, logits):
    made = case("fp4")
    model = load_model(str(made.folder), "bfloat16")
    ours, exact = logits(model, ids), logits(made.twin, ids)
    assert model.layers.mlp.up_proj.bias.dtype == "bfloat16"
    # Rounding every activation to bfloat16 moves logits of size 3 by a few hundredths.
    assert 1e-4 < np.abs(ours - exact).max() < 0.1
