"""16-bit checkpoints that are quantised while they load: what bitsandbytes makes of the same weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.checkpoint.load import load_model
from fastjax.models.quant_config import QuantConfig

QUANT_CONFIGS = {
    "skipped": QuantConfig(skip_modules=("lm_head", "model.layers.1.mlp", "model.layers.0.self_attn.q_proj")),
    "fp4": QuantConfig("fp4", double_quant=False),
    "nested": QuantConfig(),
    "mistral": QuantConfig(double_quant=False, skip_modules=("model.layers.1",)),
}


@pytest.mark.parametrize("name", QUANT_CONFIGS)
def test_the_bytes_are_those_of_bitsandbytes(name, case, packed_tensors, weight_of, same_fields):
    made = case(name)
    model = load_model(str(made.source), made.dtype, quantization=QUANT_CONFIGS[name])
    expected = packed_tensors(made.folder)
    for weight, fields in expected.items():
        same_fields(weight_of(model, weight), fields)
    for weight, parameter in made.twin.named_parameters():
        if weight.endswith("proj.weight") and weight not in expected:
            np.testing.assert_array_equal(weight_of(model, weight).astype("float32"), parameter.detach().numpy())


@pytest.mark.parametrize(("on_disk", "dtype"), [("float16", "bfloat16"), ("float16", "float32")])
def test_what_is_quantised_is_the_weight_in_the_dtype_that_is_asked_for(
    on_disk, dtype, tiny_hf, tmp_path, weight_of, same_fields
):
    import bitsandbytes.functional as bnb
    import torch

    hf_model = tiny_hf(hidden_size=40, intermediate_size=36, num_hidden_layers=1).to(getattr(torch, on_disk))
    hf_model.save_pretrained(tmp_path / "hf")
    model = load_model(str(tmp_path / "hf"), dtype, quantization=QuantConfig())
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        given = hf_model.get_parameter(name).detach().to(getattr(torch, dtype))
        codes, state = bnb.quantize_4bit(given, quant_type="nf4", compress_statistics=True)
        tensors = {
            "codes": codes, "absmax": state.absmax, "nested_scale": state.state2.absmax,
            "nested_table": state.state2.code, "nested_offset": state.offset,
        }  # fmt: skip
        arrays = {field: tensor.numpy().reshape(-1) for field, tensor in tensors.items()}
        same_fields(weight_of(model, name), arrays | {"shape": tuple(given.shape), "quant_type": "nf4", "dtype": dtype})


def test_head_and_embedding_stay_as_they_are(case):
    model = load_model(str(case("head").source), "bfloat16", quantization=QuantConfig())
    assert isinstance(model.lm_head.weight, nnx.Param) and isinstance(model.embed_tokens.weight, nnx.Param)
    assert model.lm_head.weight.dtype == model.layers.self_attn.q_proj.weight.get_value().dtype == jnp.bfloat16


def test_a_skip_list_of_everything_is_refused(case):
    with pytest.raises(UserError, match="skips every linear layer, so that nothing would be 4-bit"):
        load_model(str(case("nested").source), "float32", quantization=QuantConfig(skip_modules=("proj",)))


@pytest.mark.parametrize("entry", ["model.layers.7", "up_prj", "embed_tokens"])
def test_an_entry_of_the_skip_list_that_is_no_linear_module_is_refused(case, entry):
    with pytest.raises(
        UserError, match=f"skip_modules: '{entry}' matches no linear module; they are called model.layers.0."
    ):
        load_model(str(case("nested").source), quantization=QuantConfig(skip_modules=("up_proj", entry)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quant_type": "int4"}, "quant_type='int4' is unknown; known: nf4, fp4"),
        ({"skip_modules": "up_proj"}, "skip_modules='up_proj' must be a list"),
        ({"skip_modules": ["up_proj", 3]}, "must be a list of module names"),
        ({"skip_modules": ["a(b"]}, "'a\\(b' is not a regular expression"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        QuantConfig(**arguments)


def test_a_quantised_checkpoint_stays_as_it_is(case, packed_tensors, weight_of, same_fields):
    made = case("fp4")
    model = load_model(str(made.folder), "float32", quantization=QuantConfig("nf4"))
    name, fields = next(iter(packed_tensors(made.folder).items()))
    same_fields(weight_of(model, name), fields)
