"""Tiny models that transformers and bitsandbytes quantised and saved, with their float32 twins."""

from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

# name: (changes of the tiny config, dtype of the weights, settings of BitsAndBytesConfig)
CASES: dict[str, tuple[dict, str, dict]] = {
    "nested": ({"hidden_size": 64, "intermediate_size": 128}, "float32", {}),
    # The MLP of a whole layer and one projection of another stay as they are. Widths are no multiples of 64.
    "skipped": (
        {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6},
        "float32",
        {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn.q_proj"]},
    ),
    "fp4": (
        {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True, "mlp_bias": True},
        "bfloat16",
        {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    # The list without lm_head has it quantised; no layer has a 4-bit up_proj.
    "head": ({"hidden_size": 64, "intermediate_size": 128}, "bfloat16", {"llm_int8_skip_modules": ["up_proj"]}),
    # 40 x 36 elements leave half a block.
    "tied": (
        {"hidden_size": 40, "intermediate_size": 36, "tie_word_embeddings": True},
        "float16",
        {"bnb_4bit_quant_storage": "bfloat16"},
    ),
    "mistral": (
        {"family": "mistral", "hidden_size": 64, "intermediate_size": 192, "sliding_window": None},
        "bfloat16",
        {"llm_int8_skip_modules": ["lm_head", "model.layers.1"], "bnb_4bit_use_double_quant": False},
    ),
}


@partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, state: Any, ids: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)(ids)


class Case(NamedTuple):
    folder: Path  # 4-bit, as transformers saved it
    source: Path  # the same weights in 16 or 32 bit
    theirs: Any  # the 4-bit transformers model
    twin: Any  # a float32 transformers model of the decoded values
    dtype: str  # of the weights before they were quantised


@pytest.fixture(scope="session")
def case(tiny_hf, quantize_hf, decode_hf, tmp_path_factory):
    """case(name): one of CASES, made when it is first asked for. Folders are read only."""
    root = tmp_path_factory.mktemp("quantized")

    @cache
    def make(name: str) -> Case:
        changes, dtype, settings = CASES[name]
        hf_model = tiny_hf(**changes)
        hf_model.model.layers[0].mlp.gate_proj.weight.data[1:3] = 0  # blocks of zeros
        theirs = quantize_hf(hf_model, root / name, dtype, **settings)
        return Case(root / name, root / f"{name}-{dtype}", theirs, decode_hf(theirs), dtype)

    return make


@pytest.fixture(scope="session")
def ids() -> np.ndarray:
    """[2, 11] token ids of every tiny vocabulary."""
    return np.random.default_rng(0).integers(0, 99, (2, 11), dtype=np.int32)


@pytest.fixture(scope="session")
def logits():
    """logits(model, ids): [2, 11, 99] float32 of a CausalLM or of a transformers model."""

    def compute(model: Any, ids: np.ndarray) -> np.ndarray:
        import torch

        if not isinstance(model, torch.nn.Module):
            return np.asarray(_logits(*nnx.split(model), ids))
        with torch.no_grad():
            return model(torch.tensor(ids, dtype=torch.long)).logits.float().numpy()

    return compute


@pytest.fixture(scope="session")
def packed_tensors():
    """read(folder): {weight: {field of QuantizedWeight: array, or what the JSON object says}} of its 4-bit weights."""
    import json

    import torch
    from safetensors.torch import load_file

    def read(folder: Path) -> dict[str, dict[str, Any]]:
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        found = {}
        for key in tensors:
            name, mark, _ = key.partition(".quant_state.bitsandbytes__")
            if not mark:
                continue
            state = json.loads(bytes(tensors[key].tolist()))
            fields = {"codes": tensors[name].view(torch.uint8), "absmax": tensors[f"{name}.absmax"]}
            if "nested_offset" in state:
                fields["nested_scale"] = tensors[f"{name}.nested_absmax"]
                fields["nested_table"] = tensors[f"{name}.nested_quant_map"]
                fields["nested_offset"] = torch.tensor(state["nested_offset"], dtype=torch.float32)
            arrays = {field: value.numpy().reshape(-1) for field, value in fields.items()}
            found[name] = arrays | {"shape": tuple(state["shape"]), "quant_type": state["quant_type"],
                                    "dtype": state["dtype"]}  # fmt: skip
        return found

    return read


@pytest.fixture(scope="session")
def weight_of():
    """weight_of(model, hf_name): one layer's weight in a CausalLM."""
    from fastjax.models.quantized import layer_weight

    def find(model: Any, name: str) -> Any:
        *path, _ = name.removeprefix("model.").split(".")
        layer = int(path.pop(1)) if path[0] == "layers" else None
        module = model
        for part in path:
            module = getattr(module, part)
        return layer_weight(module.weight.get_value(), layer)

    return find


@pytest.fixture(scope="session")
def same_fields():
    """same_fields(weight, fields): fails unless a QuantizedWeight has the bytes that `packed_tensors` found."""

    def check(weight: Any, fields: dict[str, Any]) -> None:
        assert (weight.shape, weight.quant_type) == (fields["shape"], fields["quant_type"])
        assert weight.dtype.name == fields["dtype"].removeprefix("torch.")
        assert weight.nested == ("nested_scale" in fields)
        for name in ("codes", "absmax", "nested_scale", "nested_table", "nested_offset"):
            if name in fields:
                ours = np.asarray(getattr(weight, name)).reshape(-1)
                assert ours.dtype == fields[name].dtype
                np.testing.assert_array_equal(ours.view(np.uint8), fields[name].view(np.uint8), err_msg=name)

    return check
