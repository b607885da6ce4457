"""The decoder that all families share: embedding, scanned layers, final norm, head.

Attribute names are HF's, so a tensor's name in a checkpoint is its path here. Layers are one module with leaves
stacked over a leading layer dimension; `jax.lax.scan` runs it, so compile time does not grow with depth.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fastjax.kernels.attention import attention, make_tile_bounds
from fastjax.kernels.rope import rope_joined
from fastjax.kernels.swiglu import swiglu_joined
from fastjax.models.cache import KVCache
from fastjax.models.config import ModelConfig
from fastjax.models.layer_checkpoint import checkpoint_layer, in_pieces
from fastjax.models.layers import (
    DropoutKey,
    Embedding,
    Linear,
    LoraParam,
    LoraScale,
    RMSNorm,
    project,
    project_joined,
)
from fastjax.models.parallel import ALONE, Parallel
from fastjax.models.products import matmul
from fastjax.models.quantized import QuantizedParam, at_layer, matrix
from fastjax.models.remat import RematPlan, parse_plan
from fastjax.models.rope import apply_rope, rope_tables

# Inputs that dropout draws for: one random stream a projection, in this order.
_DROPOUT_STREAMS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Their inputs are what tensor ranks have shares of.
_SPLIT_INPUTS = ("o_proj", "down_proj")


_SILU = ("silu", "swish")


def _activation(name: str, x: jax.Array) -> jax.Array:
    match name:
        case name if name in _SILU:
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_new" | "gelu_pytorch_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "relu":
            return jax.nn.relu(x)
    raise AssertionError(name)


def _gated(name: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) * up in float32, rounded once."""
    return (_activation(name, gate.astype(jnp.float32)) * up).astype(gate.dtype)


# By itself jax would keep float32 copies of gate and of its activation for the backward.
_lean_gated = jax.custom_vjp(_gated, nondiff_argnums=(0,))
_lean_gated.defvjp(
    lambda name, gate, up: (_gated(name, gate, up), (gate, up)),
    lambda name, residuals, dinner: jax.vjp(partial(_gated, name), *residuals)[1](dinner),
)


def _scaled(stacked: nnx.State, scales: nnx.State) -> nnx.State:
    """The layers' state with every adapter's B multiplied by its scale."""
    variables = dict(nnx.to_flat_state(stacked))
    for (*lora, _), scale in nnx.to_flat_state(scales):
        path = (*lora, "lora_b")
        lora_b = variables[path]
        variables[path] = lora_b.replace(lora_b.get_value() * scale.get_value()[:, None, None])
    return nnx.from_flat_state(list(variables.items()))


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
        joined: bool = False,
    ) -> tuple[jax.Array, KVCache | None]:
        """`joined`: query, key and value stay side by side where they are made so, until they are turned."""
        x = parallel.enter(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        dropout = [rngs.get(name) for name in ("q_proj", "k_proj", "v_proj")]
        both = project_joined(projections, x, dropout) if joined else None
        if both is not None:
            num_heads, num_kv_heads = (linear.shape[0] // self.head_dim for linear in projections[:2])
            query, key, value = rope_joined(both, *rope, num_heads=num_heads, num_kv_heads=num_kv_heads)
        else:
            heads = (*x.shape[:-1], -1, self.head_dim)
            query, key, value = (y.reshape(heads) for y in project(projections, x, dropout))
            query, key = apply_rope(query, *rope), apply_rope(key, *rope)
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

    def __call__(
        self, x: jax.Array, rngs: dict[str, DropoutKey], parallel: Parallel, *, joined: bool = False
    ) -> jax.Array:
        """`joined`: gate and up stay side by side where they are made so."""
        x = parallel.enter(x)
        projections, dropout = (self.gate_proj, self.up_proj), [rngs.get("gate_proj"), rngs.get("up_proj")]
        both = project_joined(projections, x, dropout) if joined and self.hidden_act in _SILU else None
        if both is not None:
            inner = swiglu_joined(checkpoint_name(both, "gate_up"))
        else:
            gate, up = (checkpoint_name(y, "gate_up") for y in project(projections, x, dropout))
            inner = _lean_gated(self.hidden_act, gate, up)
        return parallel.row_product(self.down_proj, checkpoint_name(inner, "inner"), rngs.get("down_proj"))

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
        joined: tuple[str, ...] = (),
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
        x, normed = self.input_layernorm.with_sum(checkpoint_name(x, "layer_in"))
        normed = checkpoint_name(normed, "attn_in")
        mixed, cache = self.self_attn(normed, rope, rngs=rngs, parallel=parallel, joined="query" in joined, **context)
        rest = partial(self._rest, rngs=rngs, parallel=parallel, joined="gate_up" in joined)
        # Dropout draws its bits for whole rows.
        if mlp_tokens is None or self.mlp.drops(rngs):
            return rest(mixed, x), cache
        return in_pieces(rest, checkpoint_name(x + mixed, "mid"), mlp_tokens), cache

    def _rest(
        self,
        x: jax.Array,
        residual: jax.Array | None = None,
        *,
        rngs: dict[str, DropoutKey],
        parallel: Parallel,
        joined: bool,
    ) -> jax.Array:
        x, normed = self.post_attention_layernorm.with_sum(x, residual)
        return x + self.mlp(checkpoint_name(normed, "mlp_in"), rngs, parallel, joined=joined)


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
        embeddings: jax.Array | None = None,
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
          mlp_tokens: tokens of the batch that an MLP takes at a time, in layers of which `remat` does not keep
            gate and up; None means all. Its width times the tokens is most of what a layer needs beside what is kept.
          parallel: inside `jax.shard_map`, this device's part; arrays and weights are then its own.
          embeddings: [B, T, D] in the compute dtype, the embedding's rows of `input_ids`; None looks them up.
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
        graphdef, outside, scales, stacked = nnx.split(self.layers, whole, LoraScale, ...)  # type: ignore[misc]
        # Adapters are scaled here, all layers at once, and in a layer by a constant 1, which costs nothing.
        stacked, units = _scaled(stacked, scales), jax.tree.map(lambda _: np.float32(1), scales)

        def body(how: dict[str, Any], carry: tuple[jax.Array, KVCache | None], inputs: Any) -> Any:
            x, cache = carry
            leaves, layer = inputs
            weights = nnx.merge_state(at_layer(outside, layer), units, leaves)
            module = nnx.merge(graphdef, parallel.layer(weights, self.dtype))
            out = module(
                x, rope, dropout_rng=dropout_rng, documents=documents, positions=positions, cache=cache,
                layer=layer, parallel=parallel, **how,
            )  # fmt: skip
            return out, None

        x = self.embed_tokens(input_ids, self.dtype, parallel.look_up) if embeddings is None else embeddings
        carry = (x, cache)
        for first, count, policy in groups:
            inputs = (stacked, jnp.arange(first, first + count))
            if len(groups) > 1:
                inputs = (jax.tree.map(lambda leaf: leaf[first : first + count], stacked), inputs[1])  # noqa: B023
            # For a kernel, a loop would copy what is kept out of its stack; the compiler's own reads it there.
            joined = [name for name in ("query", "gate_up") if plan.unrolled or not policy.keeps(name)]
            how = {
                "joined": () if cache is not None else tuple(joined),
                "mlp_tokens": None if policy.keeps("gate_up") else mlp_tokens,
            }
            of_group = partial(body, how)
            layers = checkpoint_layer(of_group, policy, unrolled=plan.unrolled, keep_gathered=not parallel.gathers)
            carry, _ = jax.lax.scan(layers, carry, inputs, unroll=count if plan.unrolled else 1)
        x, new_cache = carry
        hidden = self.norm(x)
        return hidden if cache is None else (hidden, new_cache)

    def head_weight(self, parallel: Parallel = ALONE) -> jax.Array:
        """The head's [V, D] weight: its own, or the embedding's where the two are tied; a 4-bit one is decoded."""
        owner = self.embed_tokens if self.lm_head is None else self.lm_head
        # A tied head with an adapter has the embedding's own variable.
        name = "embed_tokens.weight" if owner.weight is self.embed_tokens.weight else "lm_head.weight"
        return matrix(parallel.table(name, owner.weight.get_value(), self.dtype))

    def logits(self, hidden: jax.Array, parallel: Parallel = ALONE) -> jax.Array:
        """Float32 logits [..., V] of hidden states [..., D]; for a few tokens: training uses the chunked loss.

        They are never rounded to the compute dtype, in which the best two tokens are often equal.
        """
        logits = matmul(hidden, self.head_weight(parallel), jnp.float32)
        if self.lm_head is not None and self.lm_head.lora is not None:
            logits = logits + self.lm_head.lora(hidden, None).astype(jnp.float32)
        return parallel.whole_vocabulary(logits)

    def __call__(self, input_ids: jax.Array, **kwargs: Any) -> Any:
        """`logits` of `hidden_states`; with a cache the pair (logits, cache)."""
        out = self.hidden_states(input_ids, **kwargs)
        if isinstance(out, tuple):
            return self.logits(out[0]), out[1]
        return self.logits(out)
