"""Ids before a cut are those of the text before it, and without need the whole text's ids are not touched."""

import random

import pytest

from fastjax.train.data.encoder import Encoder


def random_text(rng, tokenizer):
    special = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    pieces = [
        *special,
        " ",
        "  ",
        "\n",
        "\n\n",
        "The",
        " answer",
        "is",
        ".",
        ".m",
        "m",
        "e",
        "x",
        "12",
        "'s",
        "é",
        "😀",
    ]
    return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 14)))


@pytest.mark.parametrize("name", ["chatml", "mistral", "llama3", "llama3_gpt2_words", "plain", "merging"])
def test_one_cut_gives_the_prefixs_own_ids_and_keeps_the_whole_where_it_can(name, every_tokenizer):
    tokenizer = every_tokenizer[name]
    encoder = Encoder(tokenizer)
    rng = random.Random(0)
    texts = [random_text(rng, tokenizer) for _ in range(300)]
    cuts = [[rng.randint(1, len(text))] for text in texts]
    num_kept = 0
    for text, [cut], encoded in zip(texts, cuts, encoder.encode_batch(texts, cuts), strict=True):
        alone = tokenizer(text[:cut], add_special_tokens=False)["input_ids"]
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = encoded.ids.tolist()
        assert ids[: len(alone)] == alone, (text, cut)
        assert not any(s < cut < e for s, e in zip(encoded.starts, encoded.ends, strict=True))
        if whole[: len(alone)] == alone and tokenizer.convert_ids_to_tokens(whole) == whole:
            assert ids == whole
        num_kept += ids == whole
        assert encoder.encode_batch([text], [[]])[0].ids.tolist() == whole
    assert 0 < num_kept < 300


def test_cut_into_words_keeps_every_character(chatml, mistral):
    for tokenizer in (chatml, mistral):
        encoder = Encoder(tokenizer)
        text = "The answer is four, and the question was what two make."
        encoded = encoder.encode_batch([text], [[2, 6, 13, 14, 30]])[0]
        assert tokenizer.decode(encoded.ids.tolist(), clean_up_tokenization_spaces=False) == text
        assert encoded.starts[0] == 0
        assert encoded.ends[-1] == len(text)
        assert all(encoded.starts[1:] <= encoded.ends[:-1])


def test_offsets_cover_white_space_though_the_tokenizers_post_processor_trims_it(chatml):
    encoded = Encoder(chatml).encode("two   and")
    assert encoded.starts[0] == 0
    assert all(encoded.starts[1:] == encoded.ends[:-1])
