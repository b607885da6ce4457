"""SmolLM2's own tokenizer and template, when `make model` has fetched them."""

from pathlib import Path

import pytest

from fastjax.train.data import PackedRows, load_dataset, prompt_ids, train_batches

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


@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("gsm8k/train.jsonl", {"instruction": "question", "output": "answer"}, 7473),
        ("gsm8k/test.jsonl", {"prompt": "question", "completion": "answer"}, 1319),
        ("alpaca/alpaca_5000.json", None, 5000),
    ],
)
def test_every_row_of_whole_data_sets_is_accounted_for_packed_and_not(smollm2, name, columns, rows):
    source = ROOT.parent / "shared" / "data" / name
    if not source.is_file():
        pytest.skip(f"{name} is not beside this checkout")
    dataset = load_dataset(source, smollm2, max_seq_length=256, vocab_size=49152, columns=columns)
    report = dataset.report
    assert report.rows_read == rows == sum(report.forms.values())
    assert report.rows_read == report.rows_used + sum(report.dropped.values())
    assert set(report.dropped) <= {"with no target left after truncation"}
    packed = PackedRows(dataset, 256, seed=1)
    with train_batches(packed, batch_size=8, seed=1, num_epochs=1) as batches:
        tokens = targets = 0
        for batch in batches:
            tokens += int((batch["segment_ids"] > 0).sum())
            targets += int(batch["loss_mask"].sum())
    assert (tokens, targets) == (report.num_tokens, report.num_targets)
    assert packed.report.packing_fill > 0.8
