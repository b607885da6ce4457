"""A tiny model folder as transformers saves it, with a tokenizer and a chat template, and a few rows for it."""

import json
import random
from pathlib import Path

import pytest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
