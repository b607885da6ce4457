"""Llama: versions 1, 2, 3, 3.1, 3.2, and what shares their config (TinyLlama, SmolLM2)."""

from fastjax.models.family import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    keys=frozenset({"attention_bias", "mlp_bias"}),
)
