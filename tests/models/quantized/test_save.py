"""4-bit models saved here are what transformers and bitsandbytes would have saved, and load there."""

import json

import numpy as np
import pytest

from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.save import save_model
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.quant_config import QuantConfig


def tensors_of(folder):
    """name: (shape, bytes) of every tensor; codes as one column of bytes, whatever they are stored as."""
    import torch
    from safetensors.torch import load_file

    tensors, found = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        is_codes = f"{name}.absmax" in tensors
        found[name] = (None if is_codes else tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.parametrize("name", ["nested", "skipped", "fp4", "head", "tied", "mistral"])
def test_a_saved_model_is_that_of_transformers_byte_for_byte_and_loads_there(
    name, case, ids, logits, load_quantized_hf, tmp_path
):
    made = case(name)
    model = load_model(str(made.folder), "float32")
    save_model(model, tmp_path / "ours", dtype=made.dtype)
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(made.folder)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        if "quant_state" in key:
            assert json.loads(ours[key][1]) == json.loads(theirs[key][1]), key
        else:
            assert ours[key] == theirs[key], key
    again = load_quantized_hf(tmp_path / "ours")
    np.testing.assert_array_equal(logits(again, ids), logits(made.theirs, ids))
    # What stays as it is depends on the list alone, should someone quantise the folder's 16-bit source again.
    read, given = (open_checkpoint(str(folder)).quantization for folder in (tmp_path / "ours", made.folder))
    assert (read.quant_type, read.double_quant) == (given.quant_type, given.double_quant)
    for module in {key.removesuffix(".weight") for key in theirs if key.endswith("proj.weight")} | {"lm_head"}:
        assert read.skips(module) == (f"{module}.weight.absmax" not in theirs), module


def test_a_model_that_was_quantised_here_loads_there_in_shards_too(case, ids, logits, load_quantized_hf, tmp_path):
    model = load_model(str(case("nested").source), "float32", quantization=QuantConfig(skip_modules=["up_proj"]))
    save_model(model, tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    np.testing.assert_allclose(logits(load_quantized_hf(tmp_path / "ours"), ids), logits(model, ids), atol=1e-4, rtol=0)
