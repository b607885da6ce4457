"""SmolLM2's own tokenizer and template, when `make model` has fetched them."""

from pathlib import Path

import pytest

from fastjax.train.data import load_dataset, prompt_ids

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MODEL = ROOT / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def smollm2():
    from transformers import PreTrainedTokenizerFast

    if not MODEL.is_file():
        pytest.skip("SmolLM2's GGUF file is not in .cache; `make model` fetches it")
    return PreTrainedTokenizerFast.from_pretrained(str(MODEL.parent), gguf_file=MODEL.name)


@pytest.mark.parametrize("answer", ["four", "", "\n\n1. four\n", " 12", "🏳️\u200d🌈 é"])
def test_chat_is_the_templates_and_its_answer_is_learned(smollm2, answer, targets):
    messages = [
        {"role": "user", "content": "What is <|im_end|> two and two?\n"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": answer},
    ]
    dataset = load_dataset([{"messages": messages}], smollm2, max_seq_length=512, vocab_size=49152)
    assert targets(dataset, smollm2) == ["5<|im_end|>", f"{answer}<|im_end|>"]
    prompt = prompt_ids(smollm2, messages[:3], chat=True)
    assert prompt == smollm2.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=False)
    assert dataset[0].input_ids[: len(prompt)].tolist() == prompt


def test_gsm8k_questions_are_all_accounted_for(smollm2, tmp_path):
    if not QUESTIONS.is_file():
        pytest.skip("the GSM8K rows are not beside this checkout")
    import json

    source = tmp_path / "rows.jsonl"
    with QUESTIONS.open() as lines, source.open("w") as file:
        for line in list(lines)[:300]:
            row = json.loads(line)
            chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"messages": chat}) + "\n")
    dataset = load_dataset(source, smollm2, max_seq_length=2048, vocab_size=49152)
    report = dataset.report
    assert report.rows_read == report.rows_used == 300
    for row, line in zip(dataset, source.open(), strict=True):
        messages = json.loads(line)["messages"]
        assert row.input_ids.tolist() == smollm2.apply_chat_template(messages, return_dict=False)
        assert smollm2.decode(row.input_ids[row.loss_mask]) == messages[1]["content"] + "<|im_end|>"
