"""Prompt/completion, Alpaca and text rows: joined as they stand, closed with an EOS that is learned."""

import pytest

from fastjax.errors import UserError
from fastjax.train.data import load_dataset, prompt_ids


def load(rows, tokenizer, **options):
    return load_dataset(rows, tokenizer, **{"max_seq_length": 512, **options})


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def test_completion_and_eos_are_the_targets_though_pad_is_eos(plain, targets):
    assert plain.pad_token_id == plain.eos_token_id
    dataset = load([pair("What is two?", " four")], plain)
    assert targets(dataset, plain) == [" four<|endoftext|>"]
    assert dataset[0].input_ids[-1] == plain.eos_token_id
    assert dataset[0].loss_mask[-1]


def test_text_rows_are_learned_whole_whatever_train_on_says(plain):
    for train_on in ("responses", "all"):
        row = load([{"text": "The answer is four."}], plain, train_on=train_on)[0]
        assert row.input_ids.tolist() == [*plain("The answer is four.")["input_ids"], plain.eos_token_id]
        assert row.loss_mask.tolist() == [False] + [True] * (len(row.input_ids) - 1)


def test_bos_is_put_once_before_plain_text_if_the_tokenizer_does_so(mistral):
    expected = [*mistral("two and two")["input_ids"], mistral.eos_token_id]
    assert load([{"text": "two and two"}], mistral)[0].input_ids.tolist() == expected
    assert load([pair("two", " and two")], mistral)[0].input_ids.tolist() == expected
    written = load([{"text": "<s>two and two</s>"}], mistral)[0].input_ids.tolist()
    assert written.count(mistral.bos_token_id) == written.count(mistral.eos_token_id) == 1


def test_eos_that_the_completion_brings_along_is_not_doubled_and_is_learned(plain):
    row = load([pair("a", " b<|endoftext|>")], plain)[0]
    assert row.input_ids.tolist().count(plain.eos_token_id) == 1
    assert row.loss_mask[-1]


def test_empty_completion_learns_to_stop(plain, targets):
    assert targets(load([pair("a<|endoftext|>", "")], plain), plain) == ["<|endoftext|>"]
    assert targets(load([pair("a", "")], plain), plain) == ["<|endoftext|>"]


def test_merge_across_the_join_moves_no_target(merging):
    assert merging.convert_ids_to_tokens(merging("x.mem")["input_ids"]) == ["x", ".m", "e", "m"]
    row = load([pair("x.", "mem")], merging)[0]
    assert merging.convert_ids_to_tokens(row.input_ids.tolist()) == ["x", ".", "m", "e", "m", "<e>"]
    assert row.loss_mask.tolist() == [False, False, True, True, True, True]
    assert row.input_ids[:2].tolist() == prompt_ids(merging, "x.", chat=False)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("two ", "and"),
        ("two", " and"),
        ("two \n", "\nand"),
        ("two\n\n", "and"),
        ("tw", "o and"),
        ("", "and"),
        ("t  ", "  a"),
    ],
)
@pytest.mark.parametrize("name", ["plain", "chatml", "llama3", "mistral"])
def test_prompt_ids_are_those_of_inference_and_the_rest_is_the_completion(name, prompt, completion, every_tokenizer):
    tokenizer = every_tokenizer[name]
    row = load([pair(prompt, completion)], tokenizer)[0]
    asked = tokenizer(prompt)["input_ids"]
    assert prompt_ids(tokenizer, prompt, chat=False) == asked
    assert row.input_ids[: len(asked)].tolist() == asked
    if asked:
        assert row.loss_mask.tolist() == [False] * len(asked) + [True] * (len(row.input_ids) - len(asked))
    whole = tokenizer.decode(row.input_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert whole == prompt + completion


def test_alpaca_uses_the_chat_template_or_else_the_alpaca_wording(chatml, plain, targets):
    row = {"instruction": "Say the number", "input": "two", "output": "four"}
    dataset = load([row], chatml)
    messages = [{"role": "user", "content": "Say the number\n\ntwo"}, {"role": "assistant", "content": "four"}]
    assert dataset[0].input_ids.tolist() == chatml.apply_chat_template(messages, return_dict=False)
    assert targets(dataset, chatml) == ["four<|im_end|>"]
    dataset = load([row], plain)
    assert targets(dataset, plain) == ["four<|endoftext|>"]
    assert "### Input:\ntwo\n\n### Response:\nfour" in plain.decode(dataset[0].input_ids)


def test_tokenizer_without_eos_is_refused_for_rows_that_need_one(chatml):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chatml.backend_tokenizer)
    with pytest.raises(UserError, match="no EOS token"):
        load([{"text": "a b"}], tokenizer)


def test_tokenizer_without_fast_backend_is_refused():
    class Slow:
        is_fast = False

        def __len__(self):
            return 3

    with pytest.raises(UserError, match="Slow has no fast backend"):
        load([{"text": "a"}], Slow())


def test_truncation_and_padding_set_in_the_tokenizers_file_are_not_applied(plain):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(plain.backend_tokenizer.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    text = "The answer is four, and the question was what two make."
    assert load([{"text": text}], tokenizer)[0].input_ids.tolist()[:-1] == plain(text)["input_ids"]
