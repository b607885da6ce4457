"""The quickstart's rows: made by their generator, of one form, and held out from each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastjax.cli import parse
from fastjax.train.config import TrainConfig

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


def rows(name: str) -> list[tuple[str, dict[str, str]]]:
    """(question, answer object) of each row of a file of the quickstart."""
    pairs = []
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        user, assistant = json.loads(line)["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        pairs.append((user["content"], json.loads(assistant["content"])))
    return pairs


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_every_answer_is_the_taught_json_form(name: str) -> None:
    for question, answer in rows(name):
        assert list(answer) == ["answer", "confidence"], question
        assert answer["confidence"] in ("high", "medium", "low")
        assert (answer["confidence"] == "low") == (answer["answer"] == "unknown"), question


def test_no_held_out_question_or_its_subject_is_trained_on() -> None:
    train = [question for question, _ in rows("train.jsonl")]
    heldout = [question for question, _ in rows("heldout.jsonl")]
    assert len(set(train)) == len(train) == 384
    assert len(set(heldout)) == len(heldout) == 24
    assert not set(train) & set(heldout)
    assert heldout[0] == "What colour is a clear daytime sky?"
    assert not any("sky" in question for question in train)


def test_arithmetic_rows_are_right() -> None:
    signs = {"plus": "+", "minus": "-", "times": "*", "divided by": "//"}
    checked = 0
    for question, answer in rows("train.jsonl") + rows("heldout.jsonl"):
        for word, sign in signs.items():
            if f" {word} " in question:
                left, right = question.removeprefix("What is ").removesuffix("?").split(f" {word} ")
                assert str(eval(f"{left} {sign} {right}")) == answer["answer"], question
                checked += 1
    assert checked > 40


def test_the_generator_writes_the_committed_files_again(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "make_rows.py", tmp_path], check=True, capture_output=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_the_config_is_one_that_training_takes() -> None:
    config, _ = parse(TrainConfig, ["--config", str(FOLDER / "config.yaml")])
    config.validate()
    assert config.sample_prompt == rows("heldout.jsonl")[0][0]
    assert (FOLDER.parents[1] / config.data).samefile(FOLDER / "train.jsonl")
