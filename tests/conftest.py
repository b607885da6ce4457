"""Fixtures that every room's tests share: tiny random HF models, and the same weights in a CausalLM."""

import atexit
import json
import os
import random
import shutil
import tempfile

# Tests never need an accelerator; without this, an installed CUDA plugin would complain on machines without one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nothing may ask a model hub; code that tries gets an error at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny programs spend their time in the compiler: it skips what makes code fast, and every process of the session, the
# workers and the commands that tests start, shares what it makes. The controller sets this before the workers start.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastjax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Tokenised data of tests go nowhere else.
os.environ.setdefault("FASTJAX_CACHE", os.environ["JAX_COMPILATION_CACHE_DIR"])

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_hf_model(family: str = "llama", *, seed: int = 0, scale: float = 0.1, **changes: Any) -> Any:
    """A random transformers model in float32 on the CPU; `changes` are config keys over TINY."""
    import torch
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }
    config_class, model_class = classes[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**TINY, **changes})).float().eval()
    # transformers starts biases at 0 and norms at 1, which would hide a missing one.
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean=centre, std=scale)
    return model


def copy_hf_weights(hf_model: Any, config: dict | None = None, dtype: Any = "float32") -> Any:
    """A CausalLM with the weights of a transformers model, copied name by name without fastjax's own loader."""
    import jax.numpy as jnp
    from flax import nnx

    from fastjax.models.config import ModelConfig
    from fastjax.models.decoder import CausalLM

    model_config = ModelConfig.from_hf(config or hf_model.config.to_dict())
    model = CausalLM(model_config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
    for name, tensor in hf_model.state_dict().items():
        if name == "lm_head.weight" and model.lm_head is None:
            continue
        *path, leaf = name.removeprefix("model.").split(".")
        layer = None
        if path[0] == "layers":
            layer = int(path.pop(1))
        module = model
        for attribute in path:
            module = getattr(module, attribute)
        variable = getattr(module, leaf)
        array = jnp.asarray(tensor.float().numpy(), dtype)
        assert array.shape == variable.shape[0 if layer is None else 1 :], name
        variable[...] = array if layer is None else variable[...].at[layer].set(array)
    return model


def quantize_hf_model(hf_model: Any, folder: Path, dtype: str = "float32", *, shards: bool = False, **bnb: Any) -> Any:
    """A tiny model with 4-bit weights by bitsandbytes, as transformers saves it in `folder` and reads it again.

    The weights that are not 4-bit are made float32, as is what is computed. It is left in training mode: in evaluation
    bitsandbytes rounds to bfloat16 on CPUs that can.

    Args:
      dtype: of the weights that are quantised, and of the others in the folder.
      bnb: settings of transformers.BitsAndBytesConfig.
    """
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = folder.with_name(f"{folder.name}-{dtype}")
    hf_model.to(getattr(torch, dtype)).save_pretrained(source)
    hf_model.float()
    defaults = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, **{**defaults, **bnb})
    quantized = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=getattr(torch, dtype))
    quantized.save_pretrained(folder, max_shard_size="10KB" if shards else "1GB")
    return load_quantized_hf_model(folder)


def load_quantized_hf_model(folder: Path) -> Any:
    """A 4-bit folder as `quantize_hf_model` returns it; fails if a key of it is missing or not expected."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    for parameter in model.parameters():
        if not isinstance(parameter, Params4bit):
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = torch.float32
    return model.train()


def decode_hf_model(quantized: Any) -> Any:
    """A float32 model with the values of a transformers model's 4-bit weights, by bitsandbytes' generic code.

    Its AVX-512 code takes in // 64 scales a row, which is wrong where the width is a multiple of 16 and not of 64.
    """
    import copy

    import bitsandbytes.functional as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.nn import Params4bit

    config = copy.deepcopy(quantized.config)
    del config.quantization_config
    twin = type(quantized)(config).float().eval()
    values = {}
    for name, weight in quantized.named_parameters():
        values[name] = weight.detach().float()
        if isinstance(weight, Params4bit):
            state, codes = weight.quant_state, weight.data.view(-1).view(bnb.torch.uint8)
            absmax = state.absmax
            if state.nested:
                absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
            decoded = _dequantize_4bit_compute(codes, absmax, state.code, state.blocksize, state.shape, state.dtype)
            values[name] = decoded.float()
    report = twin.load_state_dict(values, strict=False)
    assert set(report.missing_keys) <= {"lm_head.weight"} and not report.unexpected_keys
    twin.tie_weights()
    return twin


@pytest.fixture(scope="session")
def tiny_hf():
    """make_hf_model(family="llama", *, seed, scale, **config_changes): a tiny random transformers model."""
    return make_hf_model


@pytest.fixture(scope="session")
def from_hf_model():
    """copy_hf_weights(hf_model, config=None, dtype="float32"): the same weights in a CausalLM."""
    return copy_hf_weights


@pytest.fixture(scope="session")
def quantize_hf():
    """quantize_hf_model(hf_model, folder, dtype="float32", **BitsAndBytesConfig): what transformers saves in 4 bit."""
    pytest.importorskip("bitsandbytes")
    return quantize_hf_model


@pytest.fixture(scope="session")
def load_quantized_hf():
    """load_quantized_hf_model(folder): the transformers model of a 4-bit folder, in float32 otherwise."""
    pytest.importorskip("bitsandbytes")
    return load_quantized_hf_model


@pytest.fixture(scope="session")
def decode_hf():
    """decode_hf_model(quantized): the float32 twin of a 4-bit transformers model."""
    return decode_hf_model


@pytest.fixture(scope="module")
def optimised():
    """Real models spend their time in the compiled code: the compiler does all it can again."""
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def smollm2_file():
    """SmolLM2-135M-Instruct's GGUF file, or a skip where it is not."""
    named = os.environ.get("FASTJAX_SMOLLM2")
    files = [Path(named)] if named else sorted((ROOT / ".cache/smollm2").glob("*.gguf"))
    if not files or not files[0].is_file():
        pytest.skip("SmolLM2 is not here; `make model` fetches it, FASTJAX_SMOLLM2 names another place")
    return files[0]


@pytest.fixture(scope="session")
def model_folder(tiny_hf, tmp_path_factory) -> Path:
    """Llama of width 32 over bytes and ChatML's two tokens, weights in float32, with a generation_config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=CHATML, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_hf(vocab_size=260, max_position_embeddings=256, eos_token_id=257, pad_token_id=257, bos_token_id=None)
    model.generation_config.eos_token_id = [257]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows() -> list[dict]:
    """Twelve short chats of different lengths."""
    draw = random.Random(0)
    words = ["red", "blue", "seven", "cat", "tree", "and", "stone"]
    return [
        {
            "messages": [
                {"role": "user", "content": " ".join(draw.choices(words, k=draw.randint(1, 4)))},
                {"role": "assistant", "content": " ".join(draw.choices(words, k=draw.randint(1, 5)))},
            ]
        }
        for _ in range(12)
    ]


@pytest.fixture(scope="session")
def rows_file(rows, tmp_path_factory) -> Path:
    """The same as a JSONL file."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def with_adapter():
    """with_adapter(hf_model, adapter): the PeftModel of an adapter's folder, without dropout; `unload` takes it off."""

    def load(hf_model: Any, adapter: Path) -> Any:
        import torch
        from peft import PeftModel

        model = PeftModel.from_pretrained(hf_model, adapter).train(hf_model.training)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()
        return model

    return load


@pytest.fixture(scope="session")
def peft_loss(with_adapter):
    """peft_loss(hf_model, adapter, rows): the mean loss of the answers' tokens, as transformers and PEFT compute it."""

    def compute(hf_model: Any, adapter: Path, rows: list[dict]) -> float:
        import torch
        from transformers import PreTrainedTokenizerFast

        model = with_adapter(hf_model, adapter)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(adapter)
        total, count = 0.0, 0
        for row in rows:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text.rstrip("\n"))["input_ids"]
            start = len(tokenizer(prompt)["input_ids"])
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].double()
            targets = torch.tensor(ids[start:])
            total += torch.nn.functional.cross_entropy(logits[start - 1 : -1], targets, reduction="sum").item()
            count += len(targets)
        model.unload()
        return total / count

    return compute
