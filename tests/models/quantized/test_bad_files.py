"""4-bit folders that are damaged or of another kind: refused with file and tensor, before any weight is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastjax.errors import UserError
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.quant_config import QuantConfig

UP = "model.layers.1.mlp.up_proj.weight"
STATE = ".quant_state.bitsandbytes__nf4"


@pytest.fixture
def damaged(case, tmp_path):
    """damaged(change, **config): a copy of a 4-bit folder after `change` of its dict of tensors."""
    source = case("nested").folder

    def make(change=None, **config) -> str:
        folder = tmp_path / "model"
        shutil.copytree(source, folder, dirs_exist_ok=True)
        if change is not None:
            tensors = load_file(source / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        settings = json.loads((source / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))
        return str(folder)

    return make


def refused(folder: str, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load_model(folder, "float32")
    for word in words:
        assert word in str(error.value)


def as_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_type": "nf3"}, "quant_type='nf3' is unknown; known: nf4, fp4"),
        ({"quant_type": "fp4"}, "quant_type='fp4' is unknown"),
        ({"blocksize": 128}, "blocksize=128; blocks of 64 are read"),
        ({"blocksize": None}, "blocksize=None"),
        ({"nested_blocksize": 64}, "nested_blocksize=64; nested blocks of 256 are read"),
        ({"nested_offset": "x"}, "nested_offset"),
        ({"nested_offset": float("nan")}, "nested_offset"),
        ({"dtype": "int8"}, "dtype='int8' must be one of float32, float16, bfloat16"),
        ({"shape": [128]}, "shape=[128] must be [out, in]"),
        ({"shape": [128, 64.5]}, "shape"),
        ({"shape": [0, 64]}, "shape"),
        ({"shape": "128x64"}, "shape='128x64' must be [out, in]"),
        ({"shape": [2**20, 2**20]}, "more than 2147483647 elements"),
        ({"shape": [128, 128]}, "holds 4096 bytes; a 4-bit weight of shape [128, 128] has 8192"),
    ],
)
def test_what_the_json_object_says(damaged, changes, words):
    def change(tensors):
        state = json.loads(bytes(tensors[UP + STATE].tolist())) | changes
        tensors[UP + STATE] = as_tensor(json.dumps(state))

    refused(damaged(change), "model.safetensors", UP, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "no JSON: "), ("[1]", "no JSON object"), ("[" * 60000, "no JSON: "), ("\xff\xfe", "no JSON: ")],
    ids=["cut off", "a list", "too deep", "no text"],
)
def test_bytes_that_are_no_json_object(damaged, text, words):
    folder = damaged(lambda tensors: tensors.update({UP + STATE: as_tensor(text)}))
    refused(folder, "model.safetensors", UP + STATE, words)


def test_a_json_object_of_absurd_length(damaged):
    folder = damaged(lambda tensors: tensors.update({UP + STATE: torch.full((70000,), 32, dtype=torch.uint8)}))
    refused(folder, UP + STATE, "has 70000 bytes")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (".absmax", f"has no {UP}.absmax, which the 4-bit weight {UP} needs (uint8, 128 elements)"),
        (".nested_absmax", f"has no {UP}.nested_absmax"),
        (".nested_quant_map", f"has no {UP}.nested_quant_map"),
        (".quant_map", f"has no {UP}.quant_map"),
        (STATE, f"{UP} is 4-bit and has no quant_state; expected {UP}{STATE}"),
        ("", f" belongs to {UP}, which is not there"),
    ],
)
def test_a_missing_part(damaged, part, words):
    refused(damaged(lambda tensors: tensors.pop(UP + part)), "model.safetensors", words)


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("", torch.zeros(4095, 1, dtype=torch.uint8), "holds 4095 bytes; a 4-bit weight of shape [128, 64] has 4096"),
        (".absmax", torch.zeros(127, dtype=torch.uint8), ".absmax is uint8 [127]"),
        (".absmax", torch.zeros(128), ".absmax is float32 [128]; a 4-bit weight of shape [128, 64] needs uint8 [128]"),
        (".nested_absmax", torch.zeros(2), ".nested_absmax is float32 [2]"),
        (".nested_quant_map", torch.zeros(255), ".nested_quant_map is float32 [255]"),
        (".quant_map", torch.linspace(-1, 1, 16), ".quant_map is not the code table of nf4; no other one is read"),
        (".quant_map", torch.full((16,), torch.nan), ".quant_map is not the code table of nf4"),
        (".quant_map", torch.zeros(15), ".quant_map is float32 [15]"),
    ],
)
def test_a_part_of_the_wrong_size_or_content(damaged, part, tensor, words):
    refused(damaged(lambda tensors: tensors.update({UP + part: tensor})), "model.safetensors", UP, words)


def test_an_unknown_kind_of_quantisation_in_the_name(damaged):
    def change(tensors):
        tensors[f"{UP}.quant_state.bitsandbytes__int5"] = tensors.pop(UP + STATE)

    refused(damaged(change), "model.safetensors", f"{UP}.quant_state.bitsandbytes__int5 has an unknown quant_type")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.embed_tokens.weight", "is 4-bit, and only weights of linear layers can be"),
        ("model.norm.weight", "has shape [1, 64], expected [64]"),
        ("model.layers.0.input_layernorm.weight", "has shape [1, 64], expected [64]"),
    ],
)
def test_a_weight_that_cannot_be_4bit(damaged, name, words):
    import bitsandbytes.functional as bnb

    def change(tensors):
        weight = tensors[name].float()
        codes, state = bnb.quantize_4bit(weight if weight.ndim == 2 else weight[None], quant_type="nf4")
        tensors[name] = codes
        tensors.update({f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()})

    refused(damaged(change), "model.safetensors", name, words)


def test_layers_of_one_projection_in_two_forms(damaged):
    def change(tensors):
        import bitsandbytes.functional as bnb

        for key in [key for key in tensors if key.startswith(f"{UP}.")]:
            del tensors[key]
        codes, state = bnb.quantize_4bit(torch.ones(128, 64), quant_type="fp4")
        tensors[UP] = codes
        tensors.update({f"{UP}.{part}": value for part, value in state.as_dict(packed=True).items()})

    refused(damaged(change), "model.safetensors", f"{UP} is fp4 of float32 with float32 block scales, and", "one form")


def test_a_4bit_weight_of_another_shape_than_the_config_says(damaged):
    refused(damaged(intermediate_size=96), "model.safetensors", "mlp.", "expected [64, 96]")


def test_4bit_tensors_without_a_word_in_config_json(damaged):
    refused(damaged(quantization_config=...), "model.safetensors", "4-bit weights", "no quantization_config")


def test_a_word_in_config_json_without_4bit_tensors(case, damaged):
    folder = damaged(quantization_config=QuantConfig().to_hf("float32"))
    shutil.copy(case("nested").source / "model.safetensors", folder)
    refused(folder, "config.json has the quantization_config of 4-bit weights", "model.safetensors holds none")


BNB = QuantConfig().to_hf("bfloat16")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BNB | {"load_in_4bit": False, "load_in_8bit": True}, "is of bitsandbytes in 8 bit"),
        ({"quant_method": "gptq", "bits": 4}, "is of 'gptq'"),
        ({"quant_method": "fp8"}, "Give the unquantised model"),
        ({"bits": 4}, "is of 'unknown'"),
        ("nf4", "quantization_config='nf4' must be an object"),
        (BNB | {"load_in_4bit": "yes"}, "load_in_4bit='yes'"),
        (BNB | {"bnb_4bit_quant_type": "int4"}, "quant_type='int4' is unknown"),
        (BNB | {"bnb_4bit_quant_type": []}, "quant_type=[] is unknown"),
        (BNB | {"bnb_4bit_use_double_quant": 2}, "bnb_4bit_use_double_quant=2"),
        (BNB | {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules='lm_head' must be a list"),
        (BNB | {"llm_int8_skip_modules": [1]}, "must be a list of module names"),
        (BNB | {"llm_int8_skip_modules": ["a(b"]}, "'a(b' is not a regular expression"),
    ],
)
def test_what_quantization_config_says(damaged, settings, words):
    refused(damaged(quantization_config=settings), "quantization_config", words)


def test_old_files_that_do_not_name_their_method_are_read(damaged):
    old = {key: value for key, value in BNB.items() if key != "quant_method" and value is not None}
    checkpoint = open_checkpoint(damaged(quantization_config=old | {"llm_int8_skip_modules": None}))
    assert checkpoint.quantization == QuantConfig()
