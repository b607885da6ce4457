"""ModelConfig: what a Llama- or Mistral-like decoder needs to know, read from and written to HF's config.json.

Reading works from an allow-list. A key is handled here, or is known to change nothing that we compute, or must hold
HF's default; anything else is an error that names it, so that no model is silently computed wrongly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastjax.errors import UserError
from fastjax.models.families import family_of
from fastjax.models.family import Family
from fastjax.models.quant_config import QuantConfig
from fastjax.models.rope import RopeConfig
from fastjax.models.rope_keys import read_rope, write_rope
from fastjax.models.values import INT32_MAX, flag, number, same, shown, token_id, token_ids, whole

# Keys that say where the file came from or how other programs run it; they change no number here.
_NEUTRAL = frozenset({
    "_name_or_path", "_model_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "architectures",
    "begin_suppress_tokens", "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range",
    "is_llama_config", "label2id", "max_sequence_length", "model_type", "output_attentions", "output_hidden_states",
    "output_scores", "prefix", "pretraining_tp", "problem_type", "return_dict", "return_dict_in_generate",
    "suppress_tokens", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache", "use_bfloat16",
    # read elsewhere or older generation settings that config.json used to carry
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "temperature", "top_k", "top_p", "do_sample", "max_length", "min_length", "num_beams", "num_beam_groups",
    "num_return_sequences",
    "repetition_penalty", "length_penalty", "diversity_penalty", "early_stopping", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "typical_p", "bad_words_ids", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
})  # fmt: skip

# Keys with one value that we compute.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0),
    "hidden_dropout": (0, 0.0),
    "resid_pdrop": (0, 0.0),
    "rope_interleaved": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "partial_rotary_factor": (1, 1.0),
    "num_experts": (0,),
}

_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

# The greatest sizes read. They lie far beyond any model of these families; a larger one is a damaged file, and would
# overflow the count of a tensor's elements.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "max_position_embeddings": INT32_MAX,
    "sliding_window": INT32_MAX,
}

_COMMON_KEYS = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "layer_types", "quantization_config",
})  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model, in HF's names. `sliding_window` counts a token's own position.

    `hf` is the config.json it came from, kept for writing it back; it takes no part in equality or hashing.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise UserError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; set it to a divisor of {self.num_attention_heads}"
            )
        if self.head_dim % 2 != 0:
            raise UserError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs, so it has to be even")
        if self.head_dim < 4 and self.rope.rope_type == "dynamic":
            raise UserError(f"head_dim={self.head_dim} is too small for rope type 'dynamic', which needs at least 4")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the contents of an HF config.json.

        Raises: UserError for an unsupported model_type, a missing size, a value of the wrong type or outside its
          range, or a key that is not handled and does not hold HF's default; it names the key and its value.
        """
        family = family_of(config.get("model_type"))
        _refuse_unhandled(config, family)
        values = {**family.defaults, **{k: v for k, v in config.items() if v is not None}}
        sizes = {key: _size(values, key) for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings",
        )}  # fmt: skip
        # `null` means something else than absent for these two: one key/value head a query head, and no window.
        explicit_null_kv = "num_key_value_heads" in config and config["num_key_value_heads"] is None
        no_kv = explicit_null_kv or "num_key_value_heads" not in values
        num_kv = sizes["num_attention_heads"] if no_kv else _size(values, "num_key_value_heads")
        explicit_null_window = "sliding_window" in config and config["sliding_window"] is None
        no_window = explicit_null_window or values.get("sliding_window") is None
        if values.get("head_dim") is None and sizes["hidden_size"] % sizes["num_attention_heads"] != 0:
            raise UserError(
                f"hidden_size={sizes['hidden_size']} is not a multiple of num_attention_heads="
                f"{sizes['num_attention_heads']} and head_dim is not given; state head_dim in config.json"
            )
        values.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
        if "layer_types" in values:
            _check_layer_types(values["layer_types"], sizes["num_hidden_layers"], windowed=not no_window)
        vocab_size = sizes["vocab_size"]
        bos, pad = values.get("bos_token_id"), values.get("pad_token_id")
        return cls(
            model_type=family.model_type,
            **sizes,
            num_key_value_heads=num_kv,
            head_dim=_size(values, "head_dim"),
            rms_norm_eps=number(values.get("rms_norm_eps"), "config.json: rms_norm_eps", 0, 1),
            rope=read_rope(config, sizes["max_position_embeddings"]),
            tie_word_embeddings=_flag(values, "tie_word_embeddings"),
            attention_bias=_flag(values, "attention_bias"),
            attention_out_bias=_flag(values, "attention_bias"),
            mlp_bias=_flag(values, "mlp_bias"),
            sliding_window=None if no_window else _size(values, "sliding_window"),
            hidden_act=_activation(values["hidden_act"]),
            bos_token_id=None if bos is None else token_id(bos, "config.json: bos_token_id", vocab_size),
            eos_token_id=token_ids(values.get("eos_token_id"), "config.json: eos_token_id", vocab_size),
            # The first Llamas say -1 for none.
            pad_token_id=None if pad in (None, -1) else token_id(pad, "config.json: pad_token_id", vocab_size),
            hf=dict(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model: what it was read from, brought up to date, in a form that transformers
        before and after 5.0 reads (both spellings of the rotary settings)."""
        family = family_of(self.model_type)
        out: dict[str, Any] = {k: v for k, v in self.hf.items() if k != "quantization_config"}
        out |= {"model_type": self.model_type, "architectures": [family.architecture]}
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
                    "tie_word_embeddings", "hidden_act"):  # fmt: skip
            out[key] = getattr(self, key)
        for key in ("attention_bias", "mlp_bias", "sliding_window"):
            if key in family.keys:
                out[key] = getattr(self, key)
        out.setdefault("bos_token_id", self.bos_token_id)
        if "eos_token_id" not in out and self.eos_token_id:
            out["eos_token_id"] = list(self.eos_token_id) if len(self.eos_token_id) > 1 else self.eos_token_id[0]
        parameters = write_rope(self.rope)
        out["rope_parameters"] = parameters
        out["rope_theta"] = self.rope.rope_theta
        scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
        out["rope_scaling"] = None if self.rope.rope_type == "default" else scaling
        out.pop("original_max_position_embeddings", None)
        return out


def _refuse_unhandled(config: Mapping[str, Any], family: Family) -> None:
    if config.get("auto_map"):
        raise UserError(
            "config.json has auto_map, code that comes with the model; fastjax never runs it. "
            f"Remove auto_map if the model is a plain {family.model_type}."
        )
    if config.get("quantization_config"):
        QuantConfig.from_hf(config["quantization_config"])
    known = _COMMON_KEYS | _NEUTRAL | family.keys
    for key, value in config.items():
        if key in known or value is None:
            continue
        if key in _FIXED and any(same(value, fixed) for fixed in _FIXED[key]):
            continue
        rule = f"must be {_FIXED[key][0]!r}" if key in _FIXED else "is not handled"
        raise UserError(
            f"config.json: {key}={shown(value)} {rule} for model_type {family.model_type!r}, and may change the "
            "model's numbers. Remove the key if it has no effect on this checkpoint."
        )


def _check_layer_types(layer_types: Any, num_layers: int, *, windowed: bool) -> None:
    expected = "sliding_attention" if windowed else "full_attention"
    if not isinstance(layer_types, list) or layer_types != [expected] * num_layers:
        raise UserError(
            f"config.json: layer_types={shown(layer_types)} must be {expected!r} for each of the {num_layers} layers; "
            "other kinds, and kinds that differ between layers, are not computed"
        )


def _size(values: Mapping[str, Any], key: str) -> int:
    return whole(values.get(key), f"config.json: {key}", most=_MOST[key])


def _flag(values: Mapping[str, Any], key: str) -> bool:
    return flag(values.get(key, False), f"config.json: {key}")


def _activation(name: Any) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"config.json: hidden_act={shown(name)} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return name
