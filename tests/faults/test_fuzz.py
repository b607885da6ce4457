"""Made-up config.json, adapter_config.json, index, quant_state, dataset rows, safetensors and GGUF: read, or refused.

Each is one of thousands of inputs that no person wrote: whatever it holds, there is a sound value or a UserError that
names the file, never another exception, in less than a second.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from fastjax.kernels.nf4.tables import CODES
from fastjax.models.checkpoint.bitsandbytes import BitsandbytesSource
from fastjax.models.checkpoint.checkpoint import TensorInfo
from fastjax.models.checkpoint.files import read_json
from fastjax.models.checkpoint.gguf_io import open_gguf
from fastjax.models.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.safetensors_io import SafetensorsFile
from fastjax.models.checkpoint.source import SafetensorsSource, open_checkpoint
from fastjax.models.checkpoint.tokenizer import load_tokenizer
from fastjax.models.config import ModelConfig
from fastjax.models.lora_config import plan_adapter
from fastjax.models.peft_config import config_from_peft
from fastjax.train.data import load_dataset

MANY = [pytest.param(80, id="few"), pytest.param(800, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", MANY)
def test_config_json(fuzz, model_folder, tmp_path, examples):
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    sound = read_json(model_folder / "config.json")

    def read(text):
        (folder / "config.json").write_bytes(text)
        ModelConfig.from_hf(open_checkpoint(str(folder)).config)

    fuzz.run(examples, fuzz.near(sound), read, name="")


@pytest.mark.parametrize("examples", MANY)
def test_generation_config_json(fuzz, model_folder, tmp_path, examples):
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    sound = {**read_json(model_folder / "generation_config.json"), "bos_token_id": 1, "temperature": 0.5}

    def read(text):
        (folder / "generation_config.json").write_bytes(text)
        open_checkpoint(str(folder))

    fuzz.run(examples, fuzz.near(sound), read, name="generation_config.json")


@pytest.mark.parametrize("examples", MANY)
def test_adapter_config_json(fuzz, model_folder, adapter_folder, tmp_path, examples):
    model = load_model(open_checkpoint(str(model_folder)), "float32")
    sound = read_json(adapter_folder / "adapter_config.json")
    file = tmp_path / "adapter_config.json"

    def read(text):
        file.write_bytes(text)
        plan_adapter(config_from_peft(read_json(file), file), model, strict=False)

    fuzz.run(examples, fuzz.near(sound), read, name="")


@pytest.mark.parametrize("examples", MANY)
def test_index_files(fuzz, model_folder, tmp_path, examples):
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    outside = tmp_path / "outside.safetensors"
    shutil.copy(model_folder / "model.safetensors", outside)
    names = SafetensorsFile(outside).names()
    shards = st.sampled_from(["model.safetensors", "../outside.safetensors", str(outside), ".", "x\0", "a" * 300])
    maps = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), shards | fuzz.scalars, max_size=5)
    texts = maps.map(lambda weights: json.dumps({"weight_map": weights}).encode("utf-8", "surrogatepass"))

    def read(text):
        (folder / "model.safetensors.index.json").write_bytes(text)
        source = SafetensorsSource(folder)
        assert {source.info(name).file.resolve().parent for name in source.names()} <= {folder.resolve()}

    fuzz.run(examples, texts | fuzz.near({"weight_map": {}, "metadata": {}}), read, name="model.safetensors")


@pytest.mark.parametrize("examples", MANY)
def test_safetensors_headers(fuzz, adapter_folder, tmp_path, examples):
    file = tmp_path / "f.safetensors"
    whole = (adapter_folder / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    entries = fuzz.near({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]})

    def with_length(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + rest

    def one_changed(entry: bytes) -> bytes:
        names = list(header)
        return with_length(json.dumps({**header, names[1]: "@"}).encode().replace(b'"@"', entry, 1))

    def read(contents):
        file.write_bytes(contents)
        opened = SafetensorsFile(file)
        for name in opened.names():
            assert opened.read(name).nbytes <= len(contents)

    inputs = st.one_of(
        entries.map(one_changed), fuzz.near(header).map(with_length), fuzz.broken(st.just(whole), within=8 + length),
        st.binary(max_size=64), st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little") + whole[8:]),
    )  # fmt: skip
    fuzz.run(examples, inputs, read, name="f.safetensors")


@pytest.mark.parametrize("examples", MANY)
def test_gguf_headers(fuzz, tmp_path, examples):
    from gguf import GGUFWriter

    file = tmp_path / "f.gguf"
    writer = GGUFWriter(file, "llama")
    for add in (
        writer.add_block_count, writer.add_head_count, writer.add_head_count_kv, writer.add_rope_dimension_count,
    ):  # fmt: skip
        add(2)
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        add(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 3])
    for name, shape in (("token_embd.weight", (3, 4)), ("output_norm.weight", (4,)), ("blk.0.attn_q.weight", (4, 4))):
        writer.add_tensor(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = file.read_bytes()
    within = whole.index(b"blk.0.attn_q.weight") + 64

    def read(contents):
        file.write_bytes(contents)
        checkpoint = open_gguf("f.gguf", file)
        ModelConfig.from_hf(checkpoint.config)
        tokenizer_from_gguf(file)
        for name in checkpoint.tensors.names():
            checkpoint.tensors.read(name)

    read(whole)
    # Numbers of eight bytes are the counts, lengths and offsets.
    numbers = st.tuples(st.integers(0, within), st.integers(0, 2**64 - 1) | st.integers(0, 99)).map(
        lambda at: whole[: at[0]] + at[1].to_bytes(8, "little") + whole[at[0] + 8 :]
    )
    fuzz.run(examples, st.one_of(fuzz.broken(st.just(whole), within), numbers, st.binary(max_size=64)), read, name="")


class Tensors:
    """A TensorSource of arrays in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def names(self) -> list[str]:
        return list(self._arrays)

    def info(self, name: str) -> TensorInfo:
        array = self._arrays[name]
        return TensorInfo(array.shape, array.dtype.name, Path("q.safetensors"))

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def describe(self) -> str:
        return "q.safetensors"


@pytest.mark.parametrize("examples", MANY)
def test_quant_states_of_4bit_weights(fuzz, examples):
    table = CODES["nf4"].astype(np.float32)
    sound = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 64], "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": 0.5,
    }  # fmt: skip
    parts = {
        "w": np.zeros((256, 1), np.uint8), "w.absmax": np.zeros(8, np.uint8), "w.quant_map": table,
        "w.nested_absmax": np.ones(1, np.float32), "w.nested_quant_map": np.zeros(256, np.float32),
    }  # fmt: skip

    def read(given):
        text, changed = given
        arrays = {**parts, **changed, "w.quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8)}
        source = BitsandbytesSource(Tensors({name: array for name, array in arrays.items() if array is not None}))
        for name in source.names():
            source.read(name)

    read((json.dumps(sound).encode(), {}))
    arrays = st.sampled_from(
        [None, np.zeros(0, np.uint8), np.zeros((3, 3), np.float32), np.full(16, np.nan, np.float32)]
    )
    changed = st.just({}) | st.dictionaries(st.sampled_from(sorted(parts)), arrays, max_size=2)
    fuzz.run(examples, st.tuples(fuzz.near(sound), changed), read, name="q.safetensors")


@pytest.mark.parametrize("examples", MANY)
def test_rows_of_data(fuzz, model_folder, tmp_path, examples):
    file = tmp_path / "rows.jsonl"
    tokenizer = load_tokenizer(model_folder)
    sound = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"text": "abc"},
        {"input_ids": [1, 2, 3]},
    ]
    turn = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": fuzz.json},
        optional={"tool_calls": fuzz.json, "from": fuzz.json},
    )
    chats = st.lists(turn | fuzz.json, max_size=4).map(lambda turns: json.dumps({"messages": turns}).encode())
    lines = st.one_of(chats, *(fuzz.near(row) for row in sound), st.binary(max_size=30))

    def read(given):
        file.write_bytes(b"\n".join(given))
        load_dataset(str(file), tokenizer, max_seq_length=32, vocab_size=260)

    fuzz.run(examples, st.lists(lines, min_size=1, max_size=3), read, name="rows.jsonl")
