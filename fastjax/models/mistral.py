"""Mistral 7B and its relatives of the same config: a Llama with a sliding window and no biases."""

from fastjax.models.family import Family

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    keys=frozenset({"sliding_window"}),
)
