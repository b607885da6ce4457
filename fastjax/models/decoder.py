"""The decoder that all families share: embedding, scanned layers, final norm, head.

Attribute names are HF's, so a tensor's name in a checkpoint is its path here. Layers are one module with leaves
stacked over a leading layer dimension; `jax.lax.scan` runs it, so compile time does not grow with depth.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fastjax.kernels.attention import attention, make_tile_bounds
from fastjax.models.cache import KVCache
from fastjax.models.config import ModelConfig
from fastjax.models.layer_checkpoint import checkpoint_layer, in_pieces
from fastjax.models.layers import DropoutKey, Embedding, Linear, LoraParam, LoraScale, RMSNorm, project
from fastjax.models.parallel import ALONE, Parallel
from fastjax.models.products import matmul
from fastjax.models.quantized import QuantizedParam, at_layer, matrix
from fastjax.models.remat import RematPlan, parse_plan
from fastjax.models.rope import apply_rope, rope_tables

# Inputs that dropout draws for: one random stream a projection, in this order.
_DROPOUT_STREAMS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Their inputs are what tensor ranks have shares of.
_SPLIT_INPUTS = ("o_proj", "down_proj")


def _activation(name: str, x: jax.Array) -> jax.Array:
    match name:
        case "silu" | "swish":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_new" | "gelu_pytorch_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "relu":
            return jax.nn.relu(x)
    raise AssertionError(name)


class Attention(nnx.Module):
    """Multi-head attention with grouped key/value heads and rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, stack: tuple[int, ...], param_dtype: Any) -> None:
        width, head_dim = config.hidden_size, config.head_dim
        query_width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        common: dict[str, Any] = {"rngs": rngs, "stack": stack, "param_dtype": param_dtype}
        self.q_proj = Linear(width, query_width, bias=config.attention_bias, **common)
        self.k_proj = Linear(width, kv_width, bias=config.attention_bias, **common)
        self.v_proj = Linear(width, kv_width, bias=config.attention_bias, **common)
        self.o_proj = Linear(query_width, width, bias=config.attention_out_bias, **common)
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_window

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        *,
        documents: dict[str, Any],
        positions: jax.Array,
        cache: KVCache | None,
        layer: jax.Array,
        rngs: dict[str, DropoutKey],
        parallel: Parallel,
    ) -> tuple[jax.Array, KVCache | None]:
        x = parallel.enter(x)
        heads = (*x.shape[:-1], -1, self.head_dim)
        names = ("q_proj", "k_proj", "v_proj")
        query, key, value = project((self.q_proj, self.k_proj, self.v_proj), x, [rngs.get(name) for name in names])
        query, key = apply_rope(query.reshape(heads), *rope), apply_rope(key.reshape(heads), *rope)
        value = value.reshape(heads)
        query, key = checkpoint_name(query, "query"), checkpoint_name(key, "key")
        value = checkpoint_name(value, "value")
        if cache is None:
            out = attention(query, key, value, window=self.sliding_window, **documents)
        else:
            cache = cache.write(layer, key, value, positions)
            keys, values, index = cache.read(layer)
            out = attention(query, keys, values, positions=positions, window=self.sliding_window, layer=index)
        return parallel.row_product(self.o_proj, out.reshape(*x.shape[:-1], -1), rngs.get("o_proj")), cache


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, stack: tuple[int, ...], param_dtype: Any) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        common: dict[str, Any] = {"rngs": rngs, "stack": stack, "param_dtype": param_dtype, "bias": config.mlp_bias}
        self.gate_proj = Linear(width, inner, **common)
        self.up_proj = Linear(width, inner, **common)
        self.down_proj = Linear(inner, width, **common)
        self.hidden_act = config.hidden_act

    def __call__(self, x: jax.Array, rngs: dict[str, DropoutKey], parallel: Parallel) -> jax.Array:
        x = parallel.enter(x)
        gate, up = project((self.gate_proj, self.up_proj), x, [rngs.get("gate_proj"), rngs.get("up_proj")])
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        inner = (_activation(self.hidden_act, gate.astype(jnp.float32)) * up).astype(x.dtype)
        return parallel.row_product(self.down_proj, inner, rngs.get("down_proj"))

    def drops(self, rngs: dict[str, DropoutKey]) -> bool:
        """Whether dropout changes what a projection reads."""
        adapters = {name: getattr(self, name).lora for name in ("gate_proj", "up_proj", "down_proj")}
        return any(lora is not None and lora.drops(rngs.get(name)) for name, lora in adapters.items())


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, stack: tuple[int, ...], param_dtype: Any) -> None:
        norm: dict[str, Any] = {"eps": config.rms_norm_eps, "stack": stack, "param_dtype": param_dtype}
        common: dict[str, Any] = {"rngs": rngs, "stack": stack, "param_dtype": param_dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, **common)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, **common)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        *,
        dropout_rng: jax.Array | None,
        parallel: Parallel,
        mlp_tokens: int | None = None,
        **context: Any,
    ) -> tuple[jax.Array, KVCache | None]:
        rngs: dict[str, DropoutKey] = {}
        if dropout_rng is not None:
            layer_rng = jax.random.fold_in(dropout_rng, context["layer"])
            for i, name in enumerate(_DROPOUT_STREAMS):
                rngs[name] = parallel.dropout_key(
                    jax.random.fold_in(layer_rng, i), x.shape[0], split=name in _SPLIT_INPUTS
                )
        x = checkpoint_name(x, "layer_in")
        mixed, cache = self.self_attn(self.input_layernorm(x), rope, rngs=rngs, parallel=parallel, **context)
        x = checkpoint_name(x + mixed, "mid")

        def rest(x: jax.Array) -> jax.Array:
            return x + self.mlp(self.post_attention_layernorm(x), rngs, parallel)

        # Dropout draws its bits for whole rows.
        if mlp_tokens is None or self.mlp.drops(rngs):
            return rest(x), cache
        return in_pieces(rest, x, mlp_tokens), cache


class CausalLM(nnx.Module):
    """A decoder-only language model of any supported family.

    Args:
      config: its shapes.
      dtype: in which activations are computed.
      param_dtype: in which the random initial weights are made (a loaded checkpoint brings its own).
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.bfloat16, param_dtype: Any = None
    ) -> None:
        param_dtype = dtype if param_dtype is None else param_dtype
        self.config = config
        self.dtype = jnp.dtype(dtype)
        common: dict[str, Any] = {"rngs": rngs, "param_dtype": param_dtype}
        padding_idx = config.pad_token_id
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, padding_idx=padding_idx, **common)
        self.layers = DecoderLayer(config, stack=(config.num_hidden_layers,), **common)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
        self.lm_head: Linear | None = nnx.data(
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, **common)
        )

    @classmethod
    def abstract(cls, config: ModelConfig, *, dtype: Any = jnp.bfloat16, param_dtype: Any = None) -> "CausalLM":
        """The same tree with jax.ShapeDtypeStruct in place of arrays: nothing is allocated."""
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype))

    def hidden_states(
        self,
        input_ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
        dropout_rng: jax.Array | None = None,
        remat: str | RematPlan = "none",
        packed: bool = True,
        mlp_tokens: int | None = None,
        parallel: Parallel = ALONE,
    ) -> Any:
        """The final norm's output for every token.

        Args:
          input_ids: [B, T] int32 in [0, V).
          positions: [B, T] int32, each token's position in its document; None means 0 .. T-1.
          segment_ids: [B, T] int32; a token sees its own segment only. 0 marks padding, and
            with a cache nothing else is read from them.
          cache: keys and values of earlier tokens; this call's are written at `positions`.
          dropout_rng: key of this call's LoRA dropout; None means none is dropped.
          remat: what the backward keeps, see `fastjax.models.remat`.
          packed: False promises that each row is one document with its padding at the end: a causal mask then is all
            that attention needs, and what padding gives means nothing.
          mlp_tokens: tokens of the batch that an MLP takes at a time, in layers of which `remat` keeps neither gate nor
            up; None means all. Its width times the tokens is most of what a layer needs beside what is kept.
          parallel: inside `jax.shard_map`, this device's part; arrays and weights are then its own.
        Returns: [B, T, D] in the compute dtype; with a cache the pair (hidden, cache).
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1], dtype=jnp.int32), input_ids.shape)
        valid = None if segment_ids is None else segment_ids > 0
        rope = rope_tables(self.config.rope, self.config.head_dim, positions, valid)
        plan = parse_plan(remat) if isinstance(remat, str) else remat
        groups = list(plan.of_layers(self.config.num_hidden_layers))
        # Where the layers are cut into groups, frozen weights stay whole: a cut of them would be a copy.
        whole = nnx.Any(QuantizedParam, nnx.Not(nnx.Any(LoraParam, LoraScale))) if len(groups) > 1 else QuantizedParam
        documents: dict[str, Any] = {}
        if segment_ids is not None and packed and cache is None:
            # Found once for all layers.
            documents = {"segment_ids": segment_ids, "tile_bounds": make_tile_bounds(segment_ids)}
        graphdef, outside, stacked = nnx.split(self.layers, whole, ...)  # type: ignore[misc]

        def body(mlp_tokens: int | None, carry: tuple[jax.Array, KVCache | None], inputs: Any) -> Any:
            x, cache = carry
            leaves, layer = inputs
            weights = nnx.merge_state(at_layer(outside, layer), leaves)
            module = nnx.merge(graphdef, parallel.layer(weights, self.dtype))
            out = module(
                x, rope, dropout_rng=dropout_rng, documents=documents, positions=positions, cache=cache,
                layer=layer, mlp_tokens=mlp_tokens, parallel=parallel,
            )  # fmt: skip
            return out, None

        x = self.embed_tokens(input_ids, self.dtype, parallel.look_up)
        carry = (x, cache)
        for first, count, policy in groups:
            inputs = (stacked, jnp.arange(first, first + count))
            if len(groups) > 1:
                inputs = (jax.tree.map(lambda leaf: leaf[first : first + count], stacked), inputs[1])  # noqa: B023
            of_group = partial(body, None if policy.keeps("gate") or policy.keeps("up") else mlp_tokens)
            layer_of = checkpoint_layer(of_group, policy, keep_gathered=not parallel.gathers)
            carry, _ = jax.lax.scan(layer_of, carry, inputs)
        x, new_cache = carry
        hidden = self.norm(x)
        return hidden if cache is None else (hidden, new_cache)

    def head_weight(self, parallel: Parallel = ALONE) -> jax.Array:
        """The head's [V, D] weight: its own, or the embedding's where the two are tied; a 4-bit one is decoded."""
        owner = self.embed_tokens if self.lm_head is None else self.lm_head
        name = "lm_head.weight" if "lm_head.weight" in parallel.specs else "embed_tokens.weight"
        return matrix(parallel.table(name, owner.weight.get_value(), self.dtype))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of hidden states [..., D]; for a few tokens: training uses the chunked loss.

        They are never rounded to the compute dtype, in which the best two tokens are often equal.
        """
        logits = matmul(hidden, self.head_weight(), jnp.float32)
        if self.lm_head is not None and self.lm_head.lora is not None:
            logits = logits + self.lm_head.lora(hidden, None).astype(jnp.float32)
        return logits

    def __call__(self, input_ids: jax.Array, **kwargs: Any) -> Any:
        """`logits` of `hidden_states`; with a cache the pair (logits, cache)."""
        out = self.hidden_states(input_ids, **kwargs)
        if isinstance(out, tuple):
            return self.logits(out[0]), out[1]
        return self.logits(out)
