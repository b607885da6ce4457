"""Tokenised data on disk: found again for equal data, tokenizer, template and options, and for nothing else."""

import json
import shutil

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import load_dataset
from fastjax.train.data.cache import cache_folder
from fastjax.train.data.store import read_store

ROWS = [
    {
        "messages": [
            {"role": "user", "content": "What is two?"},
            {"role": "assistant", "content": "The answer is four."},
        ]
    },
    {"messages": [{"role": "user", "content": "And six?"}, {"role": "assistant", "content": "12 apples"}]},
]


@pytest.fixture
def source(write):
    return write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))


def same(one, other):
    assert one.fingerprint == other.fingerprint and one.report.to_dict() == other.report.to_dict()
    for name in ("input_ids", "loss_mask", "documents", "offsets"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    return True


def test_a_second_load_reads_mapped_files_and_tokenises_nothing(source, tmp_path, chatml, monkeypatch):
    cache = tmp_path / "cache"
    made = load_dataset(source, chatml, max_seq_length=64, cache=cache)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr("fastjax.train.data.chunk.tokenise", None)
    found = load_dataset(source, chatml, max_seq_length=64, cache=cache)
    assert isinstance(found.input_ids, np.memmap) and isinstance(found.loss_mask, np.memmap)
    assert same(made, found)
    monkeypatch.undo()
    assert same(load_dataset(source, chatml, max_seq_length=64), found)


def test_data_tokenizer_template_and_options_each_make_a_key_of_their_own(source, tmp_path, chatml, make_chatml):
    cache = tmp_path / "cache"

    def entries(path=source, tokenizer=chatml, **options):
        load_dataset(path, tokenizer, **{"max_seq_length": 64, **options}, cache=cache)
        return len(list(cache.iterdir()))

    assert entries() == 1
    copy = tmp_path / "copy.jsonl"
    shutil.copy(source, copy)
    assert entries(copy) == 1  # the same bytes, wherever they lie
    assert entries(tokenizer=make_chatml("chatml_default_system")) == 2
    assert entries(max_seq_length=32) == 3
    assert entries(train_on="all") == 4
    assert entries(long_rows="split") == 5
    assert entries(skip_bad_rows=True) == 6
    assert entries(f"{source}[:1]") == 7
    copy.write_text(copy.read_text().replace("four", "five"))
    assert entries(copy) == 8
    assert entries(f"{source}[:1],{source}") == 8  # parts are kept apart


def test_a_damaged_entry_is_made_again_and_bad_rows_leave_none(source, tmp_path, chatml):
    cache = tmp_path / "cache"
    made = load_dataset(source, chatml, max_seq_length=64, cache=cache)
    (entry,) = cache.iterdir()
    for damage in (lambda: (entry / "report.json").write_text("{"), lambda: (entry / "mask.bin").write_bytes(b"1")):
        damage()
        assert read_store(entry) is None
        assert same(load_dataset(source, chatml, max_seq_length=64, cache=cache), made)
        assert read_store(entry) is not None
    source.write_text(source.read_text() + '{"x": 1}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:3: no known row form"):
        load_dataset(source, chatml, max_seq_length=64, cache=cache)
    assert list(cache.iterdir()) == [entry]


def test_a_cache_that_cannot_be_written_is_done_without(source, tmp_path, chatml):
    (tmp_path / "file").write_text("")
    assert len(load_dataset(source, chatml, max_seq_length=64, cache=tmp_path / "file" / "cache")) == 2


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTJAX_CACHE", str(tmp_path))
    assert cache_folder(None) == tmp_path / "tokens"
    assert cache_folder("here").parts == ("here", "tokens")
    assert cache_folder("off") is None
    monkeypatch.delenv("FASTJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder(None) == tmp_path / "x" / "fastjax" / "tokens"


def test_processes_give_what_one_process_gives_and_name_the_same_rows(write, chatml, monkeypatch):
    monkeypatch.setattr("fastjax.train.data.load.ROWS_AT_ONCE", 7)
    lines = [json.dumps(ROWS[n % 2] if n % 5 else {"text": f"row {n}"}) for n in range(60)]
    path = write("a.jsonl", "\n".join(lines))
    alone = load_dataset(path, chatml, max_seq_length=24, long_rows="split", num_proc=1)
    assert same(load_dataset(path, chatml, max_seq_length=24, long_rows="split", num_proc=2), alone)
    lines[33] = '{"text": '
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl:34: broken JSON"):
        load_dataset(path, chatml, max_seq_length=24, num_proc=2)
    with pytest.raises(UserError, match=r"a\.jsonl:1: token id .* is beyond the model's vocabulary of 3"):
        load_dataset(path, chatml, max_seq_length=24, num_proc=2, vocab_size=3)


def test_a_process_that_dies_is_told(write, chatml, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONSTARTUP", "")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(UserError, match="a process that tokenises ended with code 1; .*dataset_num_proc=1"):
        load_dataset(write("a.jsonl", '{"text": "a"}\n'), chatml, max_seq_length=24, num_proc=2)
