"""The notebook face: FastLanguageModel, SFTTrainer and what they hand out."""

import jax.numpy as jnp
import numpy as np
import pytest

import fastjax
from fastjax import FastLanguageModel, SFTConfig, SFTTrainer
from fastjax.errors import UserError

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return FastLanguageModel.from_pretrained(str(model_folder), dtype="float32")[1]


@pytest.fixture
def load(model_folder):
    """A function to load the tiny model in float32."""
    return lambda **arguments: FastLanguageModel.from_pretrained(
        str(model_folder), **{"dtype": jnp.float32, **arguments}
    )


@pytest.fixture(scope="module")
def trained(model_folder, rows, tmp_path_factory):
    """A trained model with its trainer and result."""
    output = tmp_path_factory.mktemp("api") / "out"
    model, tokenizer = FastLanguageModel.from_pretrained(str(model_folder), max_seq_length=64, dtype="float32")
    model = FastLanguageModel.get_peft_model(
        model, r=4, target_modules=ALL, lora_alpha=8, lora_dropout=0, bias="none",
        use_gradient_checkpointing="unsloth", random_state=3407, use_rslora=True, loftq_config=None,
    )  # fmt: skip
    args = SFTConfig(
        output_dir=str(output), per_device_train_batch_size=6, per_device_eval_batch_size=6,
        gradient_accumulation_steps=1, max_steps=4, learning_rate=1e-2, optim="adamw_torch", report_to="none",
    )  # fmt: skip
    trainer = SFTTrainer(model, tokenizer, train_dataset=rows, eval_dataset=rows, args=args)
    before = trainer.evaluate()
    result = trainer.train()
    return model, trainer, before, result


def test_the_public_names_are_lazy_and_complete():
    assert set(fastjax.__all__) <= set(dir(fastjax))
    for name in fastjax.__all__:
        assert getattr(fastjax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'FastVisionModel'"):
        _ = fastjax.FastVisionModel


def test_training_lowers_the_loss_and_the_model_in_hand_is_the_trained_one(trained):
    model, trainer, before, result = trained
    after = trainer.evaluate()
    assert after["num_target_tokens"] == before["num_target_tokens"] == 174
    assert after["eval_loss"] < before["eval_loss"] - 0.1
    assert after["eval_loss"] == pytest.approx(result.training.evaluation.loss, abs=1e-6)
    assert (result.saved / "adapter_model.safetensors").is_file()
    assert trainer.config.remat == "full" and trainer.config.use_rslora and trainer.config.lora_r == 4


def test_a_saved_adapter_loads_by_itself_and_answers_the_same(trained, tmp_path):
    model, *_ = trained
    model.save_pretrained(tmp_path / "adapter")
    again, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), dtype="float32")
    assert again.lora.r == 4 and tokenizer.chat_template
    assert again.generate("red", max_new_tokens=8) == model.generate("red", max_new_tokens=8)


def test_merging_leaves_the_model_in_hand_as_it_is(trained, model_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model, *_ = trained
    before = model.generate("red", max_new_tokens=8)
    model.save_pretrained_merged(tmp_path / "merged", save_method="merged_32bit")
    assert model.generate("red", max_new_tokens=8) == before
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    merged, _ = FastLanguageModel.from_pretrained(str(tmp_path / "merged"), dtype="float32")
    assert merged.generate("red", max_new_tokens=8) == before
    with pytest.raises(UserError, match="not empty"):
        model.save_pretrained_merged(tmp_path / "merged")
    with pytest.raises(UserError, match="save_method='merged_4bit'"):
        model.save_pretrained_merged(tmp_path / "other", save_method="merged_4bit")


def test_generate_takes_texts_messages_and_token_ids(trained, tokenizer):
    model, *_ = trained
    one = model.generate("red", max_new_tokens=8)
    messages = [{"role": "user", "content": "red"}]
    assert isinstance(one, str)
    assert model.generate(["red", messages], max_new_tokens=8) == [one, one]
    assert model.generate(messages, max_new_tokens=8, do_sample=False, use_cache=True) == one
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    padded = np.array([[257, 257, *ids], [257, 257, *ids]])
    mask = np.array([[0, 0] + [1] * len(ids)] * 2)
    out = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=8)
    assert out.shape[0] == 2 and (out[:, : padded.shape[1]] == padded).all()
    assert tokenizer.decode(out[0, padded.shape[1] :], skip_special_tokens=True) == one
    draws = [model.generate("red", max_new_tokens=8, do_sample=True, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"load_in_4bit": True}, "load_in_4bit=True: 4-bit bases are not in this release"),
        ({"load_in_8bit": True}, "load_in_8bit=True cannot be honoured"),
        ({"dtype": "float16"}, "dtype=float16.*underflow"),
        ({"dtype": "int8"}, "not one of bfloat16, float32"),
        ({"trust_remote_code": True}, "never run"),
        ({"fast_inference": True}, "fast_inference=True"),
        ({"max_seq_len": 5}, "no argument 'max_seq_len'; did you mean max_seq_length"),
        ({"max_seq_length": 0}, "max_seq_length=0"),
    ],
)
def test_what_from_pretrained_refuses(load, arguments, words):
    with pytest.raises(UserError, match=words):
        load(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bias": "all"}, "bias='all'"),
        ({"r": 0}, "r=0"),
        ({"target_modules": ["wq"]}, "wq"),
        ({"lora_dropout": 1.5}, "lora_dropout=1.5"),
        ({"use_dora": True}, "use_dora=True cannot be honoured"),
        ({"loftq_config": {"bits": 4}}, "loftq_config"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"use_gradient_checkpointing": "auto"}, "use_gradient_checkpointing='auto' is not in this release"),
        ({"use_gradient_checkpointing": "some"}, "use_gradient_checkpointing='some'"),
        ({"lora_alhpa": 3}, "no argument 'lora_alhpa'"),
    ],
)
def test_what_get_peft_model_refuses(plain, arguments, words):
    with pytest.raises(UserError, match=words):
        FastLanguageModel.get_peft_model(plain, **arguments)
    assert plain.lora is None


@pytest.fixture(scope="module")
def plain(model_folder):
    """A loaded model without an adapter, which refusals leave as it is."""
    return FastLanguageModel.from_pretrained(str(model_folder), dtype="float32")[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"train_dataset": []}, "no rows"),
        ({"train_dataset": [{"question": "x"}]}, "row 1: no known row form"),
        ({"packing": True}, "packing=True cannot be honoured by SFTTrainer"),
        ({"formatting_func": len}, "formatting_func"),
        ({"processing_class": "both"}, "two names for one thing"),
        ({"max_seq_length": 32, "args": SFTConfig(max_length=64)}, "max_seq_length is 32 and, in args, 64"),
        ({"args": SFTConfig(eval_steps=2)}, "eval_steps=2 without eval_data"),
        ({"trian_dataset": []}, "no argument 'trian_dataset'"),
    ],
)
def test_what_the_trainer_refuses(plain, tokenizer, rows, arguments, words):
    with pytest.raises(UserError, match=words):
        SFTTrainer(plain, tokenizer, **{"train_dataset": rows, **arguments})


def test_what_generate_refuses(plain):
    for arguments, words in (
        ({}, "either prompts or input_ids"),
        ({"prompts": "x", "num_beams": 4}, "num_beams=4 cannot be honoured"),
        ({"prompts": "x", "do_sample": False, "temperature": 0.7}, "temperature=0.7 with do_sample=False"),
        ({"prompts": "x", "max_tokens": 4}, "no argument 'max_tokens'"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask has shape"),
    ):
        with pytest.raises(UserError, match=words):
            plain.generate(**arguments)


def test_a_folder_in_use_is_refused_before_anything_is_written(trained):
    _, trainer, *_ = trained
    with pytest.raises(UserError, match="overwrite_output_dir"):
        trainer.train()
