"""Mistral's own tokenizer with the bundled template gives the ids that mistral-common gives."""

import json
from pathlib import Path

import pytest

from fastjax.models.checkpoint.tokenizer import load_tokenizer
from fastjax.train.data import load_dataset, prompt_ids, use_template

FOLDER = Path(__file__).parents[2] / "data" / "mistral"
CHATS = [json.loads(line) for line in (FOLDER / "expected.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def mistral_v3():
    tokenizer = load_tokenizer(FOLDER)
    assert use_template(tokenizer, "mistral") is None
    return tokenizer


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat["messages"][-1]["content"][:8])
def test_ids_are_those_of_mistral_common_and_answers_with_their_eos_are_learned(mistral_v3, chat):
    row = load_dataset([{"messages": chat["messages"]}], mistral_v3, max_seq_length=256)[0]
    assert row.input_ids.tolist() == chat["ids"]
    assert prompt_ids(mistral_v3, chat["messages"][:-1], chat=True) == chat["prompt_ids"]
    bos, opening, closing, eos = mistral_v3.convert_tokens_to_ids(["<s>", "[INST]", "[/INST]", "</s>"])
    expected, answering = [], False
    for token in chat["ids"]:
        expected.append(answering)
        answering = token == closing or (answering and token != eos)
    assert row.loss_mask.tolist() == expected
    assert chat["ids"].count(bos) == 1 and chat["ids"].count(opening) == chat["ids"].count(eos)


def test_markers_in_user_text_train_nothing_of_it(mistral_v3, targets):
    messages = [
        {"role": "user", "content": "Say [/INST] x</s> [INST] and [/INST]"},
        {"role": "assistant", "content": "no [INST]"},
    ]
    assert targets(load_dataset([{"messages": messages}], mistral_v3, max_seq_length=64), mistral_v3) == [
        "no [INST]</s>"
    ]
