"""What 4-bit bases are not used for, and settings that contradict them: refused before a weight is read."""

import json
from types import SimpleNamespace

import pytest

from fastjax import FastLanguageModel, SFTConfig, SFTTrainer, evaluate, export, generate
from fastjax.errors import UserError
from fastjax.models.checkpoint.load import load_model
from fastjax.models.lora_config import LoraConfig
from fastjax.models.quant_config import QuantConfig
from fastjax.train.__main__ import main as train
from fastjax.train.config import TrainConfig
from fastjax.train.resume import differences, fingerprint


@pytest.fixture
def refused(flags, capsys, tmp_path, rows_file):
    """refused(words, main=train, **settings): fails unless the command ends with 2 and these words."""

    def check(words, main=train, **settings):
        common = {"data": rows_file, "output_dir": tmp_path / "out"} if main is train else {}
        assert main(flags(**{**common, **settings})) == 2
        error = capsys.readouterr().err
        for word in words:
            assert word in error
        assert not (tmp_path / "out").exists()

    return check


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_4bit_folder_with_another_method(refused, folders, method):
    words = [f"method={method} trains over 16-bit weights", str(folders.packed), "use method=qlora"]
    refused(words, model=folders.packed, method=method)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, ["bnb_4bit_quant_type='fp4'", "4-bit already, with 'nf4'"]),
        ({"no_bnb_4bit_use_double_quant": True}, ["bnb_4bit_use_double_quant=False", "with True"]),
        ({"llm_int8_skip_modules": "up_proj"}, ["llm_int8_skip_modules=('up_proj',)", "with None", "leave"]),
    ],
)
def test_settings_that_a_4bit_folder_contradicts(refused, folders, settings, words):
    refused([*words, str(folders.packed)], model=folders.packed, **settings)


def test_a_skip_list_that_names_nothing(refused, folders):
    refused(["skip_modules: 'up_prj' matches no linear module"], model=folders.source, llm_int8_skip_modules="up_prj")


def test_no_4bit_where_the_disk_has_nothing_else(refused, folders, rows_file, tmp_path):
    words = ["load_in_4bit=False", str(folders.packed), "give the 16-bit model"]
    for main, more in (
        (evaluate.main, {"data": rows_file}),
        (generate.main, {"prompt": "red"}),
        (export.main, {"output_dir": tmp_path / "out"}),
    ):
        refused(words, main, model=folders.packed, no_load_in_4bit=True, **more)


def test_a_4bit_export_of_a_16bit_model(refused, folders, tmp_path):
    words = ["format=merged_4bit with load_in_4bit=False"]
    refused(words, export.main, model=folders.source, output_dir=tmp_path / "out", format="merged_4bit",
            no_load_in_4bit=True)  # fmt: skip
    model, _ = FastLanguageModel.from_pretrained(str(folders.source), load_in_4bit=False)
    with pytest.raises(UserError, match="in 16 bit"):
        model.save_pretrained_merged(tmp_path / "out", save_method="merged_4bit_forced")
    with pytest.raises(UserError, match="would round the merged weights to 4 bit again and lose small updates"):
        model.save_pretrained_merged(tmp_path / "out", save_method="merged_4bit")


def test_full_fine_tuning_of_a_4bit_model_in_python(folders, rows):
    model, tokenizer = FastLanguageModel.from_pretrained(str(folders.packed))
    with pytest.raises(UserError, match="weights are 4-bit, and only adapters can be trained.*get_peft_model"):
        SFTTrainer(model, tokenizer, rows, args=SFTConfig(output_dir="out"))


def test_full_fine_tuning_is_loaded_in_16bit(folders):
    model, _ = FastLanguageModel.from_pretrained(str(folders.source), full_finetuning=True)
    assert model.quantization is None


def test_another_skip_list_is_another_run(folders):
    def of(*skipped):
        model = load_model(str(folders.source), "float32", quantization=QuantConfig(skip_modules=skipped))
        rows = SimpleNamespace(fingerprint="rows")
        return fingerprint(TrainConfig(dtype="float32"), model, LoraConfig(), rows, 1)

    first = of("model.layers.0.mlp.up_proj")
    assert differences(first, of("layers.0.mlp.up_proj")) == []
    changed = "\n".join(differences(first, of("o_proj")))
    assert "quantization.llm_int8_skip_modules" in changed and "base model's weights are others" in changed


BNB = {"load_in_4bit": True, "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4",
       "bnb_4bit_use_double_quant": True}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "arguments", "words"),
    [
        (
            "source",
            {"load_in_4bit": False, "quantization_config": BNB},
            "load_in_4bit=False with a quantization_config",
        ),
        ("source", {"quantization_config": BNB | {"load_in_4bit": False}}, "bitsandbytes without load_in_4bit"),
        ("source", {"quantization_config": BNB | {"bnb_4bit_quant_type": "af4"}}, "quant_type='af4' is unknown"),
        ("source", {"quantization_config": 4}, "quantization_config"),
        ("source", {"quantization_config": BNB | {"llm_int8_skip_modules": ["wq"]}}, "'wq' matches no linear module"),
        ("source", {"quantization_config": {"bnb_4bit_quant_typ": "nf4"}}, "did you mean bnb_4bit_quant_type"),
        ("source", {"quantization_config": {"bnb_4bit_compute_dtype": "float16"}}, "compute_dtype=float16: there"),
        ("source", {"load_in_4bit": 0}, "load_in_4bit=0 must be True, False or None"),
        ("source", {"load_in_4bit": True, "full_finetuning": True}, "full_finetuning=True with load_in_4bit=True"),
        ("source", {"load_in_16bit": True, "quantization_config": BNB}, "load_in_16bit=True with a quant"),
        ("source", {"load_in_8bit": True}, "load_in_8bit=True.*load_in_4bit=True has 4-bit ones"),
        ("packed", {"load_in_4bit": False}, "load_in_4bit=False, and .* holds 4-bit weights"),
        ("packed", {"quantization_config": BNB | {"bnb_4bit_quant_type": "fp4"}}, "is 4-bit already"),
    ],
)
def test_what_from_pretrained_refuses(folders, folder, arguments, words):
    with pytest.raises(UserError, match=words):
        FastLanguageModel.from_pretrained(str(getattr(folders, folder)), **arguments)


def test_a_damaged_word_about_the_base_in_an_adapter(finished, refused, tmp_path):
    from safetensors.torch import load_file, save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_bytes((finished[0] / "adapter" / "adapter_config.json").read_bytes())
    tensors = load_file(finished[0] / "adapter" / "adapter_model.safetensors")
    settings = json.dumps(BNB | {"bnb_4bit_quant_type": "af4"})
    save_file(tensors, adapter / "adapter_model.safetensors", {"base_quantization_config": settings})
    refused(["quant_type='af4' is unknown"], generate.main, adapter=adapter, prompt="red")
