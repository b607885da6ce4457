"""What a 4-bit model takes, and that loading it never holds the model a second time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx

from fastjax.models.checkpoint import buffers
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.names import places
from fastjax.models.checkpoint.packed import lay_out_packed, planned_formats
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.quant_config import QuantConfig

LLAMA_3_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
}  # fmt: skip


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_llama_3_8b_takes_at_most_5_6_gib():
    model = CausalLM.abstract(ModelConfig.from_hf(LLAMA_3_8B), dtype="bfloat16")
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}
    expected = places(shapes)
    lay_out_packed(model, planned_formats(QuantConfig(), expected, "bfloat16"), expected, None)
    embedding_and_head = 2 * 128256 * 4096 * 2
    packed = (num_bytes(nnx.state(model)) - embedding_and_head) / (32 * (4096 * 4096 * 2.5 + 3 * 4096 * 14336))
    assert 0.5 < packed < 0.5 + 1 / 64 + 0.001  # bytes a weight: a code, a block's scale, and little else
    assert num_bytes(nnx.state(model)) <= 5.6 * 2**30


def test_the_device_holds_the_packed_model_and_one_tensor(tiny_hf, tmp_path, monkeypatch):
    tiny_hf(hidden_size=64, intermediate_size=128, num_hidden_layers=8, vocab_size=61).save_pretrained(tmp_path)
    before, most = num_bytes(jax.live_arrays()), 0
    put = buffers._with_row

    def watched(buffer, value, layer):
        nonlocal most
        most = max(most, num_bytes(jax.live_arrays()) - before)
        return put(buffer, value, layer)

    monkeypatch.setattr(buffers, "_with_row", watched)
    model = load_model(str(tmp_path), "float32", quantization=QuantConfig())
    unpacked = 8 * (64 * 64 * 3 + 64 * 128 * 3) * 4
    # The model, the largest tensor as it came and as it was quantised, and the tables of nested scales.
    assert num_bytes(nnx.state(model)) < most < num_bytes(nnx.state(model)) + 64 * 128 * 4 * 1.5 + 4096 < unpacked / 2


MEASURE = """
import json, sys, threading, time
import jax, jax.numpy as jnp
from flax import nnx
from fastjax.models.checkpoint.load import load_model
from fastjax.models.quant_config import QuantConfig

def anonymous():
    # Pages of the mapped file are the kernel's to drop, and do not count.
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def load():
    return load_model(sys.argv[1], quantization=QuantConfig())

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)

first = load_model(sys.argv[2], quantization=QuantConfig())  # what compiling takes stays
start = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
model = load()
done = True
watcher.join()
held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))
print(json.dumps({"peak": peak - start, "held": held}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_a_16bit_folder_is_quantised_without_a_second_copy_in_memory(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 128}
    for name, layers in (("large", 36), ("small", 1)):
        config = LlamaConfig(**shape, num_hidden_layers=layers)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
    on_disk = (tmp_path / "large" / "model.safetensors").stat().st_size
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "large"), str(tmp_path / "small")]
    optimised = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=optimised)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    print(f"{on_disk / 1e6:.0f} MB on disk, {seen['held'] / 1e6:.0f} MB held, {seen['peak'] / 1e6:.0f} MB at the peak")
    # On a CPU the device's memory is the host's: the packed model, and what one of 252 tensors needs on its way.
    assert on_disk > 290e6 and seen["held"] < 0.27 * on_disk
    assert seen["peak"] < 0.6 * on_disk
