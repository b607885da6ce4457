"""Compressed files, Arrow, folders with splits, and files larger than what is read at once."""

import gzip
import json

import pytest

from fastjax.errors import UserError
from fastjax.train.data import json_files
from fastjax.train.data.readers import read_rows

ROWS = [{"text": "a\u2028b\n", "n": 1}, {"text": "é 😀", "n": 2}, {"text": "", "n": 3}]


def rows_of(source):
    return [row for row, _ in read_rows(source)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.json.gz", json.dumps(ROWS)),
        ("a.csv.gz", "text,n\na,1\n"),
    ],
)
def test_compressed_files(name, content, write):
    path = write(name, gzip.compress(content.encode()))
    expected = [{"text": "a", "n": "1"}] if "csv" in name else ROWS
    assert rows_of(path) == expected
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match="cannot be read"):
        rows_of(path)


def test_both_forms_of_arrow_files(tmp_path):
    import pyarrow
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist(ROWS)
    for name, make in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with make(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
        placed = list(read_rows(tmp_path / f"{name}.arrow"))
        assert [row for row, _ in placed] == ROWS
        assert placed[1][1].endswith(f"{name}.arrow: row 2")
    (tmp_path / "bad.arrow").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="cannot be read as Arrow after row 0"):
        rows_of(tmp_path / "bad.arrow")


@pytest.fixture
def folder(tmp_path):
    files = {
        "train-00000-of-00002.jsonl": ["a"], "train-00001-of-00002.jsonl": ["b"], "validation.jsonl": ["c"],
        "data/test/part.jsonl": ["d"], ".hidden/train.jsonl": ["x"], "notes.txt": ["x"], "extra.jsonl": ["e"],
    }  # fmt: skip
    for name, texts in files.items():
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path / "f"


def test_a_folders_files_are_told_apart_by_the_split_in_their_names(folder):
    def texts(source):
        return [row["text"] for row in rows_of(source)]

    assert texts(folder) == texts(f"{folder}:train") == ["a", "b"]
    assert texts(f"{folder}:validation") == ["c"]
    assert texts(f"{folder}:test[:1]") == ["d"]
    assert texts(f"{folder}:extra") == ["e"]
    with pytest.raises(UserError, match="has no evil split, only test, train, validation; write FOLDER:SPLIT"):
        texts(f"{folder}:evil")
    for path in folder.glob("train*"):
        path.unlink()
    with pytest.raises(UserError, match="has no train split, only test, validation"):
        texts(folder)


def test_a_folder_without_split_names_is_all_of_it_and_one_without_data_is_refused(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert [place.rsplit("/", 1)[1] for _, place in read_rows(tmp_path)] == ["a.jsonl:1", "b.jsonl:1"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no data file in this folder; it needs one of \.jsonl"):
        rows_of(tmp_path / "empty")


def test_a_folder_with_a_data_sets_card_is_read_as_the_card_says(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: second.jsonl\n---\n"
    )
    for name in ("first", "second"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert rows_of(folder) == [{"text": "second"}]
    with pytest.raises(UserError, match="has no test split, only train"):
        rows_of(f"{folder}:test")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_json_files_are_read_in_pieces_of_any_size(size, write, monkeypatch):
    monkeypatch.setattr(json_files, "_PIECE", size)
    rows = [{"text": 'a"]},{\\', "n": [1, -2.5e3, None, True, {"é": "😀\u2028"}]}, {}, {"text": "x" * 40}]
    assert rows_of(write("a.json", json.dumps(rows, indent=1))) == rows
    assert rows_of(write("b.json", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))) == rows
    broken = write("c.json", '[{"text": "a"},\n {"text": "b",\n  "n": tru}]')
    with pytest.raises(UserError, match=r"c\.json:3: broken JSON"):
        rows_of(broken)
    with pytest.raises(UserError, match=r"d\.json:2: broken JSON .Unterminated string"):
        rows_of(write("d.json", '[{"text": "a"},\n {"text": "b'))
