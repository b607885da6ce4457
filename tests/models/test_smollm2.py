"""SmolLM2-135M-Instruct from its GGUF file: text, logits and perplexity as transformers' own GGUF loader gives them.

The figures below were made with transformers 5.24 and torch 2.13 in float32 (`AutoModelForCausalLM.from_pretrained(
folder, gguf_file=...)`); the slow test makes them anew.
"""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.kernels.linear_cross_entropy import linear_cross_entropy
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.save import save_model
from fastjax.models.checkpoint.tokenizer import load_tokenizer
from fastjax.models.generation import generate

pytestmark = pytest.mark.usefixtures("optimised")

ROOT = Path(__file__).parents[2]
NEW = 32
EOS = 2
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
ANSWERS = {
    "What is the capital of France?": [504, 3575, 282, 4649, 314, 7042, 30, 2],
    "Write a haiku about the sea.": [
        504, 6147, 282, 260, 3426, 28, 253, 13879, 6122, 28, 198, 49, 9154, 303, 5082, 282,
        260, 10393, 28, 198, 49, 13151, 282, 260, 6122, 338, 5721, 8823, 28, 198, 49, 13151,
    ],
    "How many legs has a spider? Explain.": [
        504, 2988, 288, 451, 8170, 1962, 314, 6392, 253, 16198, 30, 330, 16198, 553, 216, 40,
        7225, 28, 527, 314, 253, 1273, 31590, 30, 533, 4174, 28, 253, 16198, 553, 216, 33,
    ],
}  # fmt: skip
PERPLEXITY, NUM_TARGETS = 15.611467585614703, 2259


@pytest.fixture(scope="module")
def smollm2(smollm2_file):
    """The real model in float32, loaded once, and its tokenizer."""
    return load_model(str(smollm2_file), jnp.float32), load_tokenizer(smollm2_file)


@pytest.fixture(scope="module")
def prompts(smollm2):
    texts = [f"{SYSTEM}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ANSWERS]
    return [smollm2[1](text, add_special_tokens=False)["input_ids"] for text in texts]


def test_greedy_answers_of_one_batch_are_those_of_transformers(smollm2, prompts):
    model, tokenizer = smollm2
    answers = generate(model, prompts, max_new_tokens=NEW, eos_token_ids=[EOS])
    assert answers == list(ANSWERS.values())
    assert tokenizer.decode(answers[0]) == "The capital of France is Paris.<|im_end|>"


def test_perplexity_of_gsm8k_questions_is_that_of_transformers(smollm2):
    """Each question alone, without special tokens; every token after its first is a target."""
    model, tokenizer = smollm2
    lines = (ROOT / "tests/data/gsm8k/questions.jsonl").read_text().splitlines()
    rows = sorted((tokenizer(json.loads(line)["question"])["input_ids"] for line in lines), key=len)
    assert len(rows) == 40 and sum(len(row) - 1 for row in rows) == NUM_TARGETS

    @nnx.jit
    def loss_sum(model, ids, real):
        hidden = model.hidden_states(ids, segment_ids=real)[:, :-1]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        weights = real[:, 1:].astype(jnp.float32).reshape(-1)
        return linear_cross_entropy(hidden, model.head_weight(), ids[:, 1:].reshape(-1), weights)

    total = 0.0
    for start in range(0, 40, 10):
        batch = rows[start : start + 10]
        width = math.ceil(max(map(len, batch)) / 64) * 64
        ids = np.array([row + [0] * (width - len(row)) for row in batch], np.int32)
        real = np.array([[1] * len(row) + [0] * (width - len(row)) for row in batch], np.int32)
        total += float(loss_sum(model, ids, real))
    assert math.exp(total / NUM_TARGETS) == pytest.approx(PERPLEXITY, rel=1e-4)


@pytest.mark.slow
def test_logits_and_text_equal_transformers_gguf_loader_and_our_export_gives_the_same(
    smollm2, prompts, smollm2_file, tmp_path
):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model, tokenizer = smollm2
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name, dtype=torch.float32)
    save_model(model, tmp_path / "export", tokenizer=tokenizer)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ours = nnx.jit(lambda model, ids: model(ids))
    for prompt, expected in zip(prompts, ANSWERS.values(), strict=True):
        ids = [*prompt, *expected]
        with torch.no_grad():
            logits, again = (m.eval()(torch.tensor([ids])).logits[0].numpy() for m in (theirs, exported))
            text = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
        assert text.tolist() == expected
        # Padded on the right so that the three rows share one compilation.
        padded = np.array([ids + [0] * (96 - len(ids))], np.int32)
        np.testing.assert_allclose(ours(model, padded)[0, : len(ids)], logits, atol=1e-3, rtol=0)
        np.testing.assert_allclose(again, logits, atol=1e-3, rtol=0)
