"""Text generation: one compiled function that reads the prompts and runs the whole decoding loop.

Prompts are padded on the right, so a token's position is its index in its row and its slot in the cache. Row b reads
at position p_b and writes there; its padding is overwritten before any query can see it. Widths are rounded up to few
values, so that calls of similar size share one compilation.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from fastjax.errors import NumericsError, UserError
from fastjax.models.cache import KVCache
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.host import to_host
from fastjax.models.parallel import ALONE, Parallel
from fastjax.models.sampling import check_sampling, greedy, is_greedy, row_rngs, sample
from fastjax.models.spread import Spread, spread_of

# Prompt tokens of one pass: it bounds the [T, S] attention scores of a long prompt.
_CHUNK = 512
_MIN_WIDTH = 16
_MIN_EOS = 8


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos_token_ids: Sequence[int] = (),
    max_length: int | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, as one batch.

    A row ends after an end-of-sequence token, which is its last id; after max_new_tokens; or when it is max_length
    tokens long, prompt included, of which a warning tells. What a row gets depends on its prompt and the seed, not on
    the other rows or their order ("dynamic" rotary scaling beyond the original length excepted: it follows the
    longest row, as in transformers).

    Args:
      prompts: token ids of each row, at least one each.
      temperature: 0 takes the most likely token; otherwise logits are divided by it and one token is drawn.
      top_k, top_p, min_p: what to draw from, see `fastjax.models.sampling`; None keeps every token.
      seed: of the draws.
      eos_token_ids: each of them ends a row.
      max_length: longest row in tokens; None means the model's own limit, see `length_limit`.
    Returns: the new ids of each row, without its prompt.
    Raises: UserError for an empty prompt, one that leaves no room below max_length, ids outside the vocabulary, or
      settings out of range. NumericsError if the model's logits are NaN.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    limit = _checked_limit(model.config, max_new_tokens, max_length)
    for row, prompt in enumerate(prompts):
        check_prompt(prompt, f"prompt {row}", model.config.vocab_size, limit)
    if not prompts:
        return []
    if max(map(len, prompts)) + max_new_tokens > limit:
        num_cut = sum(len(prompt) + max_new_tokens > limit for prompt in prompts)
        warnings.warn(
            f"{num_cut} of {len(prompts)} rows may stop before max_new_tokens={max_new_tokens}: prompt and answer "
            f"together hold at most {limit} tokens",
            stacklevel=2,
        )
    batch = _padded_batch(prompts, max_new_tokens, limit)
    num_output = min(round_width(max_new_tokens), limit)
    cache_length = min(batch["input_ids"].shape[1] + num_output, limit)
    eos = np.full(-(-max(len(eos_token_ids), 1) // _MIN_EOS) * _MIN_EOS, -1, np.int32)
    eos[: len(eos_token_ids)] = eos_token_ids
    draw = {
        "rng": jax.random.key(seed),
        "temperature": jnp.float32(temperature),
        "top_k": None if not top_k else jnp.int32(min(top_k, model.config.vocab_size)),
        "top_p": None if top_p is None or top_p == 1 else jnp.float32(top_p),
        "min_p": None if not min_p else jnp.float32(min_p),
    }
    graphdef, state = nnx.split(model)
    state, spread = spread_of(model.config, state)
    tokens, counts, broken = map(to_host, _generate(
        graphdef, state, batch, jnp.asarray(eos), None if is_greedy(temperature, top_k, top_p) else draw,
        spread=spread, cache_length=cache_length, num_output=num_output, chunk=_CHUNK,
    ))  # fmt: skip
    if broken[: len(prompts)].any():
        raise NumericsError("the model's logits are NaN; its weights, or the adapter's, hold NaN or infinite numbers")
    return [tokens[row, : counts[row]].tolist() for row in range(len(prompts))]


def length_limit(config: ModelConfig) -> int:
    """Longest row in tokens: max_position_embeddings, times the factor where rotary scaling stretches beyond it."""
    stretch = config.rope.factor if config.rope.rope_type == "dynamic" else 1.0
    return int(config.max_position_embeddings * stretch)


def check_prompt(prompt: Sequence[int], name: str, vocab_size: int, limit: int) -> None:
    """Raises: UserError calling the prompt `name` if it is empty, leaves no room below `limit`, or has unknown ids."""
    if len(prompt) == 0:
        raise UserError(f"{name} has no tokens; a model needs at least one to go on from, such as its BOS")
    if len(prompt) >= limit:
        raise UserError(
            f"{name} has {len(prompt)} tokens and rows hold at most {limit}, the answer included; "
            f"shorten it to {limit - 1} or less"
        )
    # The embedding would clamp an id behind its end instead of complaining.
    wrong = [token for token in prompt if not 0 <= token < vocab_size]
    if wrong:
        raise UserError(
            f"{name} has the token id {wrong[0]}, outside the model's vocabulary of {vocab_size}; "
            "use the tokenizer that belongs to the model"
        )


def round_width(width: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, 128, ...: powers of two and the middles between them."""
    power = max(_MIN_WIDTH, 1 << max(width - 1, 0).bit_length())
    middle = power // 4 * 3
    return middle if middle > _MIN_WIDTH and width <= middle else power


def _checked_limit(config: ModelConfig, max_new_tokens: int, max_length: int | None) -> int:
    if isinstance(max_new_tokens, bool) or max_new_tokens != int(max_new_tokens) or max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be a whole number >= 1")
    limit = length_limit(config)
    if max_length is None:
        return limit
    if not 2 <= max_length <= limit:
        raise UserError(f"max_length={max_length} must lie in [2, {limit}], {limit} being the model's limit")
    return int(max_length)


def _padded_batch(prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int) -> dict[str, np.ndarray]:
    """input_ids [B, T], lengths [B] and max_new [B]; the rows that fill B up hold one token and want none."""
    num_rows = len(prompts)
    batch = 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8
    input_ids = np.zeros((batch, round_width(max(map(len, prompts)))), np.int32)
    lengths, max_new = np.ones(batch, np.int32), np.zeros(batch, np.int32)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
        max_new[row] = min(max_new_tokens, limit - len(prompt))
    return {"input_ids": input_ids, "lengths": lengths, "max_new": max_new}


@partial(jax.jit, static_argnames=("graphdef", "spread", "cache_length", "num_output", "chunk"))
def _generate(
    graphdef: Any, state: Any, batch: dict[str, jax.Array], eos: jax.Array, draw: dict[str, Any] | None, *,
    spread: Spread | None = None, cache_length: int, num_output: int, chunk: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """New tokens [B, M], how many of them each row has [B], and whether its logits were ever NaN [B].

    Where weights are spread over a mesh, every device works on all rows with its part of the heads.
    """
    parallel = ALONE if spread is None else spread.parallel(split_rows=False)
    run = partial(_on_device, graphdef, parallel, cache_length=cache_length, num_output=num_output, chunk=chunk)
    if spread is None:
        return run(state, batch, eos, draw)
    whole = PartitionSpec()
    specs = (spread.tree(state), whole, whole, whole)
    sharded = jax.shard_map(run, mesh=spread.mesh, in_specs=specs, out_specs=whole, check_vma=False)
    return sharded(state, batch, eos, draw)


def _on_device(
    graphdef: Any, parallel: Parallel, state: Any, batch: dict[str, jax.Array], eos: jax.Array,
    draw: dict[str, Any] | None, *, cache_length: int, num_output: int, chunk: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    model = nnx.merge(graphdef, state)
    lengths, max_new = batch["lengths"], batch["max_new"]
    num_heads = parallel.num_kv_heads
    cache = KVCache.create(model.config, lengths.shape[0], cache_length, model.dtype, num_heads=num_heads)

    def choose(hidden: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(hidden, parallel)
        if draw is None:
            token = greedy(logits)
        else:
            rngs = row_rngs(draw["rng"], positions)
            token = sample(logits, rngs, **{k: draw[k] for k in ("temperature", "top_k", "top_p", "min_p")})
        # argmax points at a NaN wherever there is one.
        return token, jnp.isnan(jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0])

    def record(carry: dict[str, Any], hidden: jax.Array) -> dict[str, Any]:
        counts, ended = carry["counts"], carry["ended"]
        token, nan = choose(hidden, lengths + counts)
        slot = jnp.where(ended, num_output, counts)
        counts = counts + ~ended
        return carry | {
            "tokens": carry["tokens"].at[jnp.arange(slot.shape[0]), slot].set(token, mode="drop"),
            "last": jnp.where(ended, carry["last"], token),
            "broken": carry["broken"] | (nan & ~ended),
            "ended": ended | (counts >= max_new) | jnp.any(token[:, None] == eos, axis=-1),
            "counts": counts,
        }

    def step(carry: dict[str, Any]) -> dict[str, Any]:
        # The newest token stands right before the position that the next one takes.
        positions = (lengths + carry["counts"] - 1)[:, None]
        hidden, cache = model.hidden_states(
            carry["last"][:, None], positions=positions, segment_ids=(~carry["ended"]).astype(jnp.int32)[:, None],
            cache=carry["cache"], parallel=parallel,
        )  # fmt: skip
        return record(carry | {"cache": cache}, hidden[:, 0])

    hidden, cache = _prefill(model, parallel, batch["input_ids"], lengths, cache, chunk)
    start = {
        "cache": cache,
        "tokens": jnp.zeros((lengths.shape[0], num_output), jnp.int32),
        "counts": jnp.zeros_like(lengths),
        "last": jnp.zeros_like(lengths),
        "ended": max_new == 0,
        "broken": jnp.zeros(lengths.shape, bool),
    }
    end = jax.lax.while_loop(lambda carry: ~jnp.all(carry["ended"]), step, record(start, hidden))
    return end["tokens"], end["counts"], end["broken"]


def _prefill(
    model: CausalLM, parallel: Parallel, input_ids: jax.Array, lengths: jax.Array, cache: KVCache, chunk: int
) -> tuple[jax.Array, KVCache]:
    """The hidden state [B, D] of each prompt's last token, and the cache with every prompt in it.

    Prompts above `chunk` tokens pass in chunks of at most that. "Dynamic" rotary angles depend on the whole prompt's
    length: one chunk there.
    """
    batch, width = input_ids.shape
    whole = width <= chunk or model.config.rope.rope_type == "dynamic"
    chunk = width if whole else math.gcd(width, chunk)

    def read(start: jax.Array | int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        last, cache = carry
        positions = jnp.broadcast_to(start + jnp.arange(chunk, dtype=jnp.int32), (batch, chunk))
        ids = jax.lax.dynamic_slice_in_dim(input_ids, start, chunk, axis=1)
        real = (positions < lengths[:, None]).astype(jnp.int32)
        hidden, cache = model.hidden_states(ids, positions=positions, segment_ids=real, cache=cache, parallel=parallel)
        index = lengths - 1 - start
        here = (index >= 0) & (index < chunk)
        picked = jnp.take_along_axis(hidden, jnp.clip(index, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
        return jnp.where(here[:, None], picked, last), cache

    carry = (jnp.zeros((batch, model.config.hidden_size), model.dtype), cache)
    if whole:
        return read(0, carry)
    num_chunks = (jnp.max(lengths) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, num_chunks, lambda index, carry: read(index * chunk, carry), carry)
