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
    return FastLanguageModel.from_pretrained(str(model_folder), dtype="float32", load_in_4bit=False)[1]


@pytest.fixture
def load(model_folder):
    """A function to load the tiny model in float32, unquantised."""
    return lambda **arguments: FastLanguageModel.from_pretrained(
        str(model_folder), **{"dtype": jnp.float32, "load_in_4bit": False, **arguments}
    )


@pytest.fixture(scope="module")
def trained(model_folder, rows, tmp_path_factory):
    """A trained model with its trainer and result; the base is in 4 bit, as it is where nothing is said."""
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
    assert trainer.config.remat == "auto" and trainer.config.use_rslora and trainer.config.lora_r == 4


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
    merged, _ = FastLanguageModel.from_pretrained(str(tmp_path / "merged"), dtype="float32", load_in_4bit=False)
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
        ({"quantization_config": {"load_in_4bit": True}}, "load_in_4bit=False with a quantization_config"),
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
        ({"use_gradient_checkpointing": "some"}, "use_gradient_checkpointing='some'"),
        ({"lora_alhpa": 3}, "no argument 'lora_alhpa'"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"max_seq_length": 1}, "max_seq_length=1 is too small"),
    ],
)
def test_what_get_peft_model_refuses(plain, arguments, words):
    with pytest.raises(UserError, match=words):
        FastLanguageModel.get_peft_model(plain, **arguments)
    assert plain.lora is None


@pytest.fixture(scope="module")
def plain(model_folder):
    """A loaded model without an adapter, unquantised, which refusals leave as it is."""
    return FastLanguageModel.from_pretrained(str(model_folder), dtype="float32", load_in_4bit=False)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"train_dataset": []}, "no rows"),
        ({"train_dataset": [{"question": "x"}]}, "row 1: no known row form"),
        ({"packing": True}, "packing=True cannot be honoured by SFTTrainer"),
        ({"formatting_func": len}, "row 1: formatting_func len returned a int"),
        ({"data_collator": len}, "data_collator=len cannot be honoured"),
        ({"dataset_text_field": "body"}, "row 1: the column 'body' of dataset_text_field is missing"),
        ({"args": SFTConfig(bf16=True)}, "bf16=True, and the model's dtype is float32"),
        ({"args": SFTConfig(tf32=True)}, "jax_default_matmul_precision"),
        ({"args": SFTConfig(eos_token="<EOS>")}, "eos_token='<EOS>', and the tokenizer's is '<|im_end|>'"),
        ({"args": SFTConfig(data_seed=5)}, "data_seed=5 and seed=3407"),
        ({"args": {"output_dir": "x"}}, "args is a dict"),
        ({"args": SFTConfig(eval_strategy="epoch")}, "eval_strategy='epoch' without eval_dataset"),
        ({"processing_class": "both"}, "two names for one thing"),
        ({"max_seq_length": 32, "args": SFTConfig(max_length=64)}, "max_seq_length is 32 and, in args, 64"),
        ({"args": SFTConfig(eval_steps=2)}, "eval_steps=2 without eval_dataset"),
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
        ({"input_ids": [[1, 2], [1]]}, "input_ids is rows of unequal length"),
        ({"input_ids": [[1.5, 2]]}, "input_ids is float64 of shape"),
        ({"prompts": "x", "repetition_penalty": 1.1}, "repetition_penalty=1.1 cannot be honoured"),
        ({"prompts": ["x", "y"], "streamer": object()}, "streamer with 2 prompts"),
        ({"prompts": [1, 2, 3], "max_length": 3}, "max_length=3 leaves no room"),
        ({"prompts": "x", "min_p": 2, "temperature": 1.0}, "min_p=2 must lie in"),
    ):
        with pytest.raises(UserError, match=words):
            plain.generate(**arguments)


def test_a_folder_in_use_is_refused_before_anything_is_written(trained):
    _, trainer, *_ = trained
    with pytest.raises(UserError) as error:
        trainer.train()
    assert "trainer.train(resume_from_checkpoint=True)" in str(error.value)
    assert "SFTConfig(overwrite_output_dir=True)" in str(error.value) and "--" not in str(error.value)


def test_resuming_a_run_that_is_overwritten_is_refused_in_the_words_of_python(plain, tokenizer, rows):
    trainer = SFTTrainer(plain, tokenizer, rows, args=SFTConfig(overwrite_output_dir=True))
    with pytest.raises(UserError, match="^resume_from_checkpoint=True goes on with the run that overwrite_output_dir"):
        trainer.train(resume_from_checkpoint=True)


def test_train_returns_what_trl_s_returns_and_keeps_the_history(trained):
    _, trainer, _, result = trained
    assert result.metrics["train_runtime"] > 0 and result.global_step == trainer.state.global_step == 4
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 4 and min(losses) <= result.training_loss <= max(losses)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value):
        self.given.append(value)

    def end(self):
        self.ended = True


def test_generate_takes_what_a_tokenizer_returns(trained, tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import TextStreamer

    model, *_ = trained
    messages = [{"role": "user", "content": "red"}]
    one = model.generate("red", max_new_tokens=8)
    mapping = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="np")
    ids = mapping["input_ids"][0]
    out = model.generate(**mapping, max_new_tokens=8, use_cache=True, repetition_penalty=1.0, pad_token_id=257)
    assert tokenizer.batch_decode(out[:, len(ids) :], skip_special_tokens=True) == [one]
    spellings = (mapping, ids, ids.tolist(), [ids.tolist()], torch.tensor(ids), [torch.tensor(ids)], jnp.asarray(ids))
    for spelling in spellings:
        np.testing.assert_array_equal(model.generate(spelling, max_new_tokens=8), out)
        np.testing.assert_array_equal(model.generate(input_ids=spelling, max_length=len(ids) + 8), out)
    left = tokenizer(["red", "blue and red"], padding=True, padding_side="left", return_tensors="pt")
    both = model.generate(**left, max_new_tokens=8)
    alone = model.generate(tokenizer("red")["input_ids"], max_new_tokens=8)
    np.testing.assert_array_equal(both[0, left["input_ids"].shape[1] :][: alone.shape[1] - 3], alone[0, 3:])
    recorder, shown = Recorder(), []
    model.generate(ids, max_new_tokens=8, streamer=recorder)
    np.testing.assert_array_equal(recorder.given[0], out[:, : len(ids)])
    np.testing.assert_array_equal(np.concatenate(recorder.given[1:]), out[0, len(ids) :])
    assert recorder.ended
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = lambda text, stream_end=False: shown.append(text)
    model.generate(ids, max_new_tokens=8, streamer=streamer)
    assert "".join(shown) == one


def test_calling_the_model_gives_the_logits_of_transformers_for_left_padded_rows_too(plain, model_folder):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model_folder)
    ids, mask = torch.tensor([[257, 257, 5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = theirs(ids[:, 2:]).logits
    got = plain(ids, attention_mask=mask).logits
    np.testing.assert_allclose(got[:, 2:], expected.numpy(), atol=1e-4)
    with pytest.raises(UserError, match="token id 999"):
        plain([999])


def test_the_config_reads_as_in_transformers(plain):
    assert plain.config.vocab_size == 260 and plain.config.model_type == plain.config.to_dict()["model_type"] == "llama"
    plain.config.use_cache = False
    with pytest.raises(UserError, match="config.hidden_size=64 cannot be honoured"):
        plain.config.hidden_size = 64


def test_names_from_elsewhere_are_answered_with_the_way_out(plain):
    for owner, name, words in (
        (plain, "save_pretrained_gguf", "save_pretrained_merged"),
        (plain, "push_to_hub", "hf upload"),
        (plain, "eval", "leave it out"),
        (fastjax, "get_chat_template", "tokenizer.chat_template"),
        (fastjax, "LoraConfig", "get_peft_model"),
    ):
        assert not hasattr(owner, name)
        with pytest.raises(UserError, match=words):
            getattr(owner, name)
    with pytest.raises(AttributeError, match="no attribute 'wings'"):
        _ = plain.wings
    assert fastjax.is_bfloat16_supported() is True


def test_a_cell_that_adds_the_adapter_runs_twice_and_merging_makes_room_for_another(load, capsys):
    model, _ = load(max_seq_length=64)
    add = FastLanguageModel.get_peft_model
    settings = {"r": 4, "lora_alpha": 8, "random_state": 1, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    add(model, **settings, target_modules=ALL, max_seq_length=32)
    assert model.max_seq_length == 32
    model.print_trainable_parameters()
    assert capsys.readouterr().out.startswith("trainable params: ")
    adapted = model([1, 2, 3]).logits
    assert add(model, **settings, target_modules="all-linear") is model
    assert "stays as it is" in capsys.readouterr().err
    for changed in ({"r": 8}, {"random_state": 2}, {"target_modules": ["q_proj"]}):
        with pytest.raises(UserError, match=r"merge_and_unload\(\), or load the base again"):
            add(model, **{**settings, "target_modules": ALL, **changed})
    assert model.merge_and_unload() is model and model.lora is None
    np.testing.assert_allclose(model([1, 2, 3]).logits, adapted, atol=1e-4)
    with pytest.raises(UserError, match="no adapter to merge"):
        model.merge_and_unload()
    add(model, r=2)
    assert model.lora.r == 2 and "save the merged model" in capsys.readouterr().err


TEXT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"


def texts_of(trainer):
    """(text, what of it is learned) of each row."""
    decode = trainer.base.tokenizer.decode
    rows = [trainer.train_rows[i] for i in range(len(trainer.train_rows))]
    return [(decode(row.input_ids), decode(row.input_ids[row.loss_mask])) for row in rows]


def test_formatting_functions_and_text_columns_give_the_text_that_is_trained_on(plain, tokenizer):
    rows = [{"q": "red", "a": "cat", "body": "one"}, {"q": "blue", "a": "tree", "body": "two"}]
    expected = [TEXT.format(row["q"], row["a"]) for row in rows]

    def one_row(row):
        return TEXT.format(row["q"], row["a"])

    def columns(batch):
        return [TEXT.format(q, a) for q, a in zip(batch["q"], batch["a"], strict=True)]

    for function in (one_row, lambda row: [one_row(row)], columns):
        trainer = SFTTrainer(plain, tokenizer, rows, formatting_func=function)
        assert [text for text, _ in texts_of(trainer)] == expected
    trainer = SFTTrainer(plain, tokenizer, iter(rows), args=SFTConfig(dataset_text_field="body"))
    assert [text for text, _ in texts_of(trainer)] == ["one<|im_end|>", "two<|im_end|>"]
    both = [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "text": "mine"}]
    assert texts_of(SFTTrainer(plain, tokenizer, both, dataset_text_field="text"))[0][0] == "mine<|im_end|>"


def test_train_on_responses_only_finds_the_answers_of_text_and_of_chats(plain, tokenizer, rows, capsys):
    parts = {"instruction_part": "<|im_start|>user\n", "response_part": "<|im_start|>assistant\n"}
    text = TEXT.format("red", "cat") + "\n" + TEXT.format("blue", "tree")
    trainer = SFTTrainer(plain, tokenizer, [{"text": text}])
    with pytest.raises(UserError, match="rows of text are learned whole"):
        fastjax.train_on_responses_only(trainer)
    assert fastjax.train_on_responses_only(trainer, **parts) is trainer
    assert texts_of(trainer) == [(text, "cat<|im_end|>\ntree<|im_end|>")]
    trainer = SFTTrainer(plain, tokenizer, rows)
    targets = trainer.train_rows.report.num_targets
    assert fastjax.train_on_responses_only(trainer, **parts) is trainer
    assert "changes nothing" in capsys.readouterr().err
    trainer = SFTTrainer(plain, tokenizer, rows, args=SFTConfig(train_on="all"))
    assert trainer.train_rows.report.num_targets > targets
    fastjax.train_on_responses_only(trainer)
    assert trainer.train_rows.report.num_targets == targets and trainer.config.train_on == "responses"


def test_strategies_by_epoch_become_that_many_steps(plain, tokenizer, rows):
    args = SFTConfig(save_strategy="epoch", eval_strategy="epoch", per_device_train_batch_size=2,
                     gradient_accumulation_steps=2)  # fmt: skip
    config = SFTTrainer(plain, tokenizer, rows, rows, args=args).config
    assert config.save_steps == config.eval_steps == 3


def test_what_unsloth_notebooks_write_for_the_dtype_is_taken(load, tokenizer, rows, capsys):
    model, _ = load(dtype=None)
    yes = fastjax.is_bfloat16_supported()
    SFTTrainer(model, tokenizer, rows, args=SFTConfig(fp16=not yes, bf16=yes))
    assert "bf16" not in capsys.readouterr().err
    SFTTrainer(model, tokenizer, rows, args=SFTConfig(bf16=False))
    assert "note: bf16=False changes nothing" in capsys.readouterr().err
    with pytest.raises(UserError, match="fp16=True cannot be honoured by SFTConfig: there is no loss scaling"):
        SFTConfig(fp16=True)


def test_float32_models_take_false_for_both(plain, tokenizer, rows, capsys):
    SFTTrainer(plain, tokenizer, rows, args=SFTConfig(fp16=False, bf16=False))
    assert capsys.readouterr().err == ""
