"""`--inspect`: the rows of the first steps as they are trained, and the counts of all rows."""

import io
import json
import re

import pytest

from fastjax.train.__main__ import main as train
from fastjax.train.inspect_rows import Inspection, Piece, ShownRow, print_inspection, token_texts


@pytest.fixture
def words(model_folder, rows_file):
    return [f"--model={model_folder}", f"--data={rows_file}", "--max_seq_length=96", "--packing"]


def test_packed_rows_are_printed_with_their_borders_targets_and_counts(words, rows, capsys):
    assert train([*words, "--inspect", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 rows as they are trained: ⟦trained⟧, masked\n")
    assert "━━ row 1: step 1, " in out and "━━ row 2: step 1, " in out and "━━ row 3" not in out
    assert "── document 1: " in out and "── document 2: " in out
    shown = [row for row in rows if f"<|im_start|>assistant↵\n⟦{row['messages'][1]['content']}<|im_end|>⟧↵\n" in out]
    assert len(shown) == sum(int(count) for count in re.findall(r"step 1, (\d+) document", out)) > 2
    assert "rows     read 12 (12 messages), used 12, dropped 0" in out
    assert "packed   " in out and " % filled" in out


def test_colours_and_the_page_and_json(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert train([*words, "--inspect=1"]) == 0
    assert "\x1b[1;32m" in capsys.readouterr().out
    page = tmp_path / "rows.html"
    assert train([*words, "--inspect=3", f"--html={page}", "--eval_fraction=0.25"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("class='row'") == 3 and "<span class='t' title='" in text and "<span class='m' title='" in text
    assert "held out for evaluation" in text and "http" not in text
    assert "&lt;|im_start|&gt;" in text and "<|im_start|>" not in text
    capsys.readouterr()
    assert train([*words, "--inspect=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    document = row["documents"][0]
    assert len(document["ids"]) == len(document["texts"]) == len(document["trained"])
    assert found["data"]["rows_used"] == 12 and found["eval_data"] is None
    assert train([*words, "--inspect=1", f"--html={tmp_path / 'none' / 'p.html'}"]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_texts_of_tokens_join_to_the_whole_text(model_folder):
    from fastjax.models.checkpoint.tokenizer import load_tokenizer

    for folder in (model_folder, "tests/data/mistral"):
        tokenizer = load_tokenizer(folder)
        text = "é 😀 two  and\n\n three 🏳️\u200d🌈 <x> " * 3 + "ü"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        texts = token_texts(tokenizer, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_markup_in_a_row_stays_text():
    from fastjax.train.data import DataReport
    from fastjax.train.inspect_html import page

    piece = Piece([1], ["<script>alert(1)</script>"], [True])
    found = Inspection([ShownRow(1, [piece], 8)], DataReport("<b>.jsonl"), None)
    assert "<script>" not in page(found) and "<b>" not in page(found)
    stream = io.StringIO()
    print_inspection(found, stream)
    assert "⟦<script>alert(1)</script>⟧" in stream.getvalue()
