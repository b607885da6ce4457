"""Every file kind gives the same rows, and every broken file is named with its line."""

import csv
import json

import pytest

from fastjax.errors import UserError
from fastjax.train.data.readers import read_rows

ROWS = [
    {"instruction": "Say hi", "input": "", "output": "hi,\n\"you\""},
    {"instruction": "Größe?", "input": "a\u2028b", "output": "groß 😀"},
]  # fmt: skip


def write_kind(kind, path):
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_file_kind_gives_the_same_rows(kind, tmp_path):
    path = tmp_path / f"rows.{kind}"
    write_kind(kind, path)
    assert [row for row, _ in read_rows(path)] == ROWS
    assert [row for row, _ in read_rows(str(path))] == ROWS


def test_places_are_file_and_line(write):
    jsonl = write("a.jsonl", '{"text": "a"}\n\n{"text": "b"}\n')
    assert [place for _, place in read_rows(jsonl)] == [f"{jsonl}:1", f"{jsonl}:3"]
    listed = write("a.json", '[\n {"text": "a"},\n\n {"text":\n "b"}, {"text": "c"}]\n')
    assert [place for _, place in read_rows(listed)] == [
        f"{listed}:2 (item 1)", f"{listed}:4 (item 2)", f"{listed}:5 (item 3)"
    ]  # fmt: skip
    table = write("a.csv", 'text,id\n"two\nlines",1\nb,2\n')
    assert [place for _, place in read_rows(table)] == [f"{table}:2", f"{table}:4"]
    assert [place for _, place in read_rows([{"text": "a"}, {"text": "b"}])] == ["row 1", "row 2"]


def test_json_file_with_one_object_a_line_is_read_as_json_lines(write):
    assert [row for row, _ in read_rows(write("a.json", '{"text": "a"}\n{"text": "b"}\n'))] == [
        {"text": "a"}, {"text": "b"}
    ]  # fmt: skip


def test_byte_order_mark_is_no_part_of_the_first_key(write):
    for name, text in (("a.jsonl", '{"text": "a"}'), ("a.json", '[{"text": "a"}]'), ("a.csv", "text\na\n")):
        assert [row for row, _ in read_rows(write(name, b"\xef\xbb\xbf" + text.encode()))] == [{"text": "a"}]


def test_folder_is_read_through_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_kind("jsonl", folder / "train.jsonl")
    assert [row for row, _ in read_rows(folder)] == ROWS
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert [row for row, _ in read_rows(tmp_path / "saved")] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a\.jsonl:2: broken JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not UTF-8"),
        ("a.json", '[{"text": "a"},\n {"text": }]', r"a\.json:2: broken JSON"),
        ("a.json", '[{"text": "a"}\n {"text": "b"}]', r"a\.json:2: broken JSON .*',' or ']'"),
        ("a.json", '[{"text": "a"}', r"a\.json:1: broken JSON .*end of the file"),
        ("a.json", '"text"', r"a\.json:1: starts with"),
        ("a.json", b'[{"text": "\xff"}]', "not UTF-8"),
        ("a.json", '[{"text": "a"},\n {"text": ' + "9" * 5000 + "}]", r"a\.json:2: unreadable JSON"),
        ("a.json", '{"text": "a"}\n{"text": ' + "9" * 5000 + "}", r"a\.json:2: unreadable JSON"),
        ("a.jsonl", '{"text": ' + "9" * 5000 + "}", r"a\.jsonl:1: broken JSON"),
        ("a.csv", 'text,id\na,1\n"b"c,2\n', r"a\.csv:3: broken CSV"),
        ("a.csv", "text,id\na,1,2\n", r"a\.csv:2: 3 fields under a header of 2"),
        ("a.parquet", "no table", "cannot be read as Parquet"),
        ("a.xlsx", "", r"the file kind \.xlsx is not known; use one of \.jsonl"),
        ("a.jsonl", "", "no rows"),
        ("a.jsonl", "\n \n", "no rows"),
        ("a.json", " ", "no rows"),
        ("a.json", "[ ]", "no rows"),
        ("a.csv", "", "no rows"),
        ("a.csv", "text\n", "no rows"),
    ],
)  # fmt: skip
def test_broken_and_empty_files_are_refused_by_name(name, content, words, write):
    with pytest.raises(UserError, match=words):
        list(read_rows(write(name, content)))


def test_missing_file_and_unknown_hub_id_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such data file"):
        list(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="no such data file"):
        list(read_rows("none.jsonl"))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids asking the hub; check the path"):
        list(read_rows("nobody/has-this-data-set"))
    with pytest.raises(UserError, match="rows in memory: no rows"):
        list(read_rows([]))


@pytest.mark.parametrize("name", ["imdb", "my rows", "data/rows/train", "~/rows"])
def test_a_name_that_is_no_file_and_no_hub_id_is_a_missing_file(name):
    with pytest.raises(UserError, match=r"no such data file or folder; give a \.jsonl,.* or a hub id owner/name"):
        list(read_rows(name))


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch, capfd):
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"nobody/rows: .* the hub \(http://127.0.0.1:9\) cannot be reached"):
        list(read_rows("nobody/rows"))
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
    assert "Retry" not in capfd.readouterr().err


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(UserError, match="cannot be read .Permission denied"):
        list(read_rows(path))
