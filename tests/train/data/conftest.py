"""Small real tokenizers: byte-level BPE and SentencePiece-like BPE, with chat templates of known styles."""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "You are a helpful assistant. The answer is four, and the question was what two and two make.",
    "What is the capital of France? The capital of France is Paris.",
    "How many apples are left? There are 12 apples left in the basket.",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    "Line one.\n\nLine two.\n\n\nLine  three   has    spaces.\n\n",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As CHATML, but a chat without a system turn gets one: prefixes of such a chat may be no prefix of the whole.
CHATML_DEFAULT_SYSTEM = (
    "{% if not messages or messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Reasoning is cut out of every answer but the last, as newer models do: a prefix is not a prefix any more.
THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(specials, pattern=None):
    """Byte-level BPE; words are split as in GPT-2, or by `pattern`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    backend.decoder = decoders.ByteLevel()
    # This post-processor trims white space out of the offsets, as in GPT-2's file.
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return backend


def sentencepiece_like(specials):
    """BPE over "▁" words with a space put before the text, and a post-processor that adds BOS."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    alphabet = [chr(c) for c in range(32, 127)] + ["\n", "é", "😀"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return backend


def wrap(backend, template, **specials):
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **specials)


@pytest.fixture(scope="session")
def templates():
    """The chat templates by name."""
    return {
        "chatml": CHATML,
        "chatml_default_system": CHATML_DEFAULT_SYSTEM,
        "mistral": MISTRAL,
        "llama3": LLAMA3,
        "zephyr": ZEPHYR,
        "thinking": THINKING,
        "tools": TOOLS,
    }


@pytest.fixture(scope="session")
def make_chatml(templates):
    """A function from a template's name to a byte-level tokenizer with ChatML's tokens; pad is eos, there is no BOS."""
    backend = byte_level(["<|im_start|>", "<|im_end|>"])

    def make(template="chatml"):
        return wrap(backend, templates.get(template, template), eos_token="<|im_end|>", pad_token="<|im_end|>")

    return make


@pytest.fixture(scope="session")
def chatml(make_chatml):
    return make_chatml()


@pytest.fixture(scope="session")
def mistral(templates):
    """[INST] and [/INST] are one token each; the template writes BOS and the post-processor would add it again."""
    backend = sentencepiece_like(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    return wrap(backend, templates["mistral"], bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")


def llama3_style(template, pattern):
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = byte_level(specials, pattern)
    bos = (specials[0], 0)
    backend.post_processor = processors.TemplateProcessing(single=f"{specials[0]} $A", special_tokens=[bos])
    return wrap(backend, template, bos_token=specials[0], eos_token="<|eot_id|>")


@pytest.fixture(scope="session")
def llama3(templates):
    """White space up to a newline is one word, so that a header's two newlines are one token before any answer."""
    return llama3_style(templates["llama3"], r" ?[^\s]+|\s*[\r\n]+|\s+(?!\S)|\s+")


@pytest.fixture(scope="session")
def llama3_gpt2_words(templates):
    """The two newlines of a header are one token at the end of a prompt, and two before a letter."""
    return llama3_style(templates["llama3"], None)


@pytest.fixture(scope="session")
def zephyr(templates):
    """The role markers are plain text, only </s> is a token; BOS is added to plain text."""
    backend = sentencepiece_like(["<unk>", "<s>", "</s>"])
    return wrap(backend, templates["zephyr"], bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def plain():
    """A base model's tokenizer: no chat template, no BOS."""
    return wrap(byte_level(["<|endoftext|>"]), None, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="session")
def merging():
    """A tokenizer with a merge of "." + "m" and one of newlines, without a pre-tokenizer's word limits."""
    vocab = {"<e>": 0, "x": 1, ".": 2, "m": 3, "e": 4, ".m": 5, "\n": 6, "\n\n": 7, "U": 8, "A": 9, ":": 10}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(".", "m"), ("\n", "\n")]))
    template = (
        "{% for m in messages %}{{ m['role'][0] | upper + ':\n' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:\n' }}{% endif %}"
    )
    return wrap(backend, template, eos_token="<e>", pad_token="<e>")


@pytest.fixture(scope="session")
def every_tokenizer(chatml, mistral, llama3, llama3_gpt2_words, zephyr, plain, merging):
    return {
        "chatml": chatml,
        "mistral": mistral,
        "llama3": llama3,
        "llama3_gpt2_words": llama3_gpt2_words,
        "zephyr": zephyr,
        "plain": plain,
        "merging": merging,
    }


@pytest.fixture
def targets():
    """A function (dataset, row, tokenizer) -> the runs of consecutive targets, each as text."""

    def runs(dataset, tokenizer, row=0):
        ids, mask = dataset[row].input_ids, dataset[row].loss_mask
        found, current = [], []
        for token, target in zip(ids.tolist(), mask.tolist(), strict=True):
            if target:
                current.append(token)
            elif current:
                found.append(current)
                current = []
        return [tokenizer.decode(run) for run in ([*found, current] if current else found)]

    return runs


@pytest.fixture
def write(tmp_path):
    """A function (name, text or bytes) -> the path of a file with that content."""

    def to_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return to_file
