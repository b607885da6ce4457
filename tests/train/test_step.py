"""The step: one division by the targets of the whole optimiser step, frozen leaves untouched, fresh dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import Lora, LoraParam
from fastjax.models.remat import POLICIES
from fastjax.train.evaluate import evaluate
from fastjax.train.loss import loss_sum, shifted_targets
from fastjax.train.mesh import make_mesh, put_batch, replicated
from fastjax.train.optim import make_optimizer
from fastjax.train.schedule import make_schedule
from fastjax.train.step import make_eval_step, make_train_step

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
)
RANK = 3
WIDTH = 40
MESH = make_mesh()


def parts(*, dropout=0.0, head=False, dtype=jnp.float32):
    """(graphdef, trainable, frozen) of a tiny model whose adapters already change its output."""
    model = CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=dtype)
    rng = np.random.default_rng(1)

    def adapter(linear, stack):
        out_features, in_features = linear.weight.shape[-2:]
        a = jnp.asarray(rng.normal(size=(*stack, RANK, in_features)) * 0.1, jnp.float32)
        b = jnp.asarray(rng.normal(size=(*stack, out_features, RANK)) * 0.1, jnp.float32)
        linear.lora = Lora(a, b, jnp.full(stack, 2.0), dropout)

    for linear in (model.layers.self_attn.q_proj, model.layers.self_attn.v_proj, model.layers.mlp.down_proj):
        adapter(linear, (CONFIG.num_hidden_layers,))
    if head:
        adapter(model.lm_head, ())
    return nnx.split(model, LoraParam, ...)


def rows(lengths, seed=0, width=WIDTH, dirty=False):
    """[N, T] host rows; the first token is no target. `dirty` fills the padding with ids, which must not matter."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), width)
    inside = np.arange(width)[None] < np.asarray(lengths)[:, None]
    ids = rng.integers(1, 61, shape, dtype=np.int32)
    mask = inside & (np.arange(width)[None] > 0)
    return {
        "input_ids": ids if dirty else np.where(inside, ids, 0),
        "loss_mask": mask,
        "segment_ids": inside.astype(np.int32),
    }


def batch(host_rows, num_micro):
    return jax.tree.map(lambda x: x.reshape(num_micro, -1, x.shape[-1]), host_rows)


def optimizer(rate=1e-2, decay=0.0, clip=0.0):
    schedule = make_schedule("constant", rate, warmup_steps=0, total_steps=10)
    return make_optimizer(schedule, weight_decay=decay, max_grad_norm=clip)


def run(step, opt, model_parts, batches, seed=0):
    """The step over the batches: (trainable, frozen, list of metrics)."""
    graphdef, trainable, frozen = model_parts
    trainable, frozen = jax.device_put((trainable, frozen), replicated(MESH))
    # The step donates what it gets, and these leaves belong to the caller.
    trainable = jax.tree.map(jnp.copy, trainable)
    opt_state, log = opt.init(trainable), []
    for one in batches:
        trainable, opt_state, metrics = step(trainable, opt_state, frozen, put_batch(one, MESH), jax.random.key(seed))
        log.append(jax.device_get(metrics))
    return trainable, frozen, log


def assert_trees_close(ours, theirs, **tolerance):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.fixture(scope="module")
def plain():
    model_parts, opt = parts(), optimizer()
    return model_parts, opt, make_train_step(model_parts[0], opt, mesh=MESH)


@partial(jax.jit, static_argnames="graphdef")
def naive_loss(trainable, frozen, data, graphdef):
    """Mean loss by the definition, its gradient's norm, and the number of targets, from all logits at once."""
    seen = data["loss_mask"][:, 1:] & (data["segment_ids"][:, 1:] == data["segment_ids"][:, :-1])

    def mean(trainable):
        # Causal: what stands behind a row's end cannot reach its tokens, so padding needs no mask here.
        logits = nnx.merge(graphdef, trainable, frozen)(data["input_ids"])[:, :-1]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), data["input_ids"][:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(seen, losses, 0.0)) / jnp.sum(seen)

    loss, gradient = jax.value_and_grad(mean)(trainable)
    return loss, jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient))), jnp.sum(seen)


def assert_is_the_definition(log, model_parts, data):
    graphdef, trainable, frozen = model_parts
    loss, norm, count = naive_loss(trainable, frozen, data, graphdef)
    assert log["num_target_tokens"] == count
    np.testing.assert_allclose(log["loss_sum"] / count, loss, rtol=1e-5)
    np.testing.assert_allclose(log["grad_norm"], norm, rtol=1e-4)


def test_accumulation_equals_one_large_batch(plain):
    model_parts, opt, step = plain
    data = rows([4, 35])
    whole, _, log_whole = run(step, opt, model_parts, [batch(data, 1)] * 2)
    cut, _, log_cut = run(step, opt, model_parts, [batch(data, 2)] * 2)
    for a, b in zip(log_whole, log_cut, strict=True):
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-5)
        np.testing.assert_allclose(a["loss_sum"], b["loss_sum"], rtol=1e-5)
        assert a["num_target_tokens"] == b["num_target_tokens"] == 3 + 34
        assert a["num_tokens"] == b["num_tokens"] == 39
    # Elements whose gradient is rounding noise move by +-lr under Adam; hence not 1e-6 everywhere at this rate.
    assert_trees_close(whole, cut, atol=1e-4)


def test_loss_and_gradient_are_those_of_the_definition(plain):
    model_parts, opt, step = plain
    data = rows([4, 35])
    assert_is_the_definition(run(step, opt, model_parts, [batch(data, 1)])[2][0], model_parts, data)


def test_padding_contents_and_width_do_not_matter(plain):
    model_parts, opt, step = plain
    clean, dirty = rows([4, 35]), rows([4, 35], dirty=True)
    wide = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 24))), clean)
    logs = [run(step, opt, model_parts, [batch(one, 1)])[2][0] for one in (clean, dirty, wide)]
    for other in logs[1:]:
        np.testing.assert_allclose(other["loss_sum"], logs[0]["loss_sum"], rtol=1e-6)
        np.testing.assert_allclose(other["grad_norm"], logs[0]["grad_norm"], rtol=1e-5)


def test_targets_are_shifted_once_and_never_cross_a_document():
    one = {
        "input_ids": jnp.array([[7, 8, 9, 5, 6, 0]]),
        "loss_mask": jnp.array([[False, True, True, True, True, False]]),
        "segment_ids": jnp.array([[1, 1, 1, 2, 2, 0]]),
    }
    targets, counts = shifted_targets(one)
    assert counts[0].tolist() == [True, True, False, True, False, False]
    assert targets[0][counts[0]].tolist() == [8, 9, 6]


def test_a_batch_without_targets_moves_nothing_but_counts_its_tokens(plain):
    model_parts, opt, step = plain
    data = rows([9, 7])
    data["loss_mask"][:] = False
    after, _, (log,) = run(step, opt, model_parts, [batch(data, 1)])
    assert (log["num_target_tokens"], log["num_tokens"], log["loss_sum"], log["grad_norm"]) == (0, 16, 0, 0)
    assert log["finite"]
    assert_trees_close(after, model_parts[1], atol=0)


def test_frozen_leaves_stay_and_have_no_moments_under_weight_decay_and_a_head_adapter_learns():
    model_parts = parts(head=True)
    opt = optimizer(decay=0.1, clip=1.0)
    step = make_train_step(model_parts[0], opt, mesh=MESH)
    before = jax.device_get(model_parts[2])
    data = [rows([20, 35], seed=s) for s in range(3)]
    after, frozen, log = run(step, opt, model_parts, [batch(one, 1) for one in data])
    assert_trees_close(frozen, before, atol=0)
    assert_is_the_definition(log[0], model_parts, data[0])
    sizes = [leaf.size for leaf in jax.tree.leaves(model_parts[1])]
    assert sum(leaf.size for leaf in jax.tree.leaves(opt.init(model_parts[1]))) == 2 * sum(sizes) + 2
    for leaf, old in zip(jax.tree.leaves(after), jax.tree.leaves(model_parts[1]), strict=True):
        assert np.all(np.asarray(leaf) != np.asarray(old))


def test_a_trained_head_has_the_gradient_of_its_definition():
    graphdef, params, rest = nnx.split(CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32), nnx.Param, ...)
    data, opt = rows([30, 12]), optimizer()
    _, _, (log,) = run(make_train_step(graphdef, opt, mesh=MESH), opt, (graphdef, params, rest), [batch(data, 1)])
    assert_is_the_definition(log, (graphdef, params, rest), data)


def test_dropout_differs_from_step_to_step_and_not_from_run_to_run():
    model_parts = parts(dropout=0.5, head=True)
    graphdef, trainable, frozen = model_parts
    opt = optimizer(rate=0.0)
    step = make_train_step(graphdef, opt, mesh=MESH)
    twins = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), rows([35]))
    same = [batch(twins, 2)] * 3
    losses = [float(m["loss_sum"]) for m in run(step, opt, model_parts, same)[2]]
    assert len(set(losses)) == 3
    assert losses == [float(m["loss_sum"]) for m in run(step, opt, model_parts, same)[2]]
    assert losses != [float(m["loss_sum"]) for m in run(step, opt, model_parts, same, seed=1)[2]]
    dry = nnx.split(nnx.merge(*parts(dropout=0.0, head=True)), LoraParam, ...)
    results = [
        evaluate(make_eval_step(p[0], mesh=MESH), p[1], p[2], [batch(twins, 1)], mesh=MESH) for p in (model_parts, dry)
    ]
    assert results[0] == results[1]


def test_bfloat16_base_keeps_float32_adapters_that_move_at_a_small_rate():
    model_parts = parts(dtype=jnp.bfloat16)
    opt = optimizer(rate=1e-5)
    step = make_train_step(model_parts[0], opt, mesh=MESH)
    after, frozen, _ = run(step, opt, model_parts, [batch(rows([35, 30]), 1)] * 3)
    for leaf, old in zip(jax.tree.leaves(after), jax.tree.leaves(model_parts[1]), strict=True):
        assert leaf.dtype == jnp.float32
        assert np.all(np.asarray(leaf) != np.asarray(old))
    assert frozen["layers"]["self_attn"]["q_proj"]["weight"].dtype == jnp.bfloat16
    model = nnx.merge(model_parts[0], after, frozen)
    assert model.hidden_states(jnp.ones((1, 4), jnp.int32)).dtype == jnp.bfloat16


def test_every_remat_policy_gives_the_same_loss_and_gradients():
    model_parts, data = parts(dropout=0.3), jax.tree.map(jnp.asarray, rows([35, 30]))

    def gradient(remat):
        def loss(trainable):
            model = nnx.merge(model_parts[0], trainable, model_parts[2])
            return loss_sum(model, data, dropout_rng=jax.random.key(0), remat=remat)[0]

        return jax.jit(jax.value_and_grad(loss))(model_parts[1])

    expected = gradient("none")
    for name in (
        *POLICIES,
        "1*no_matmul,full",
        "1*layer_in+mid,1*attention",
        "unrolled,most",
        "unrolled,1*no_matmul,full",
    ):
        if name != "none":
            assert_trees_close(gradient(name), expected, rtol=1e-5, atol=1e-6)


def test_a_nan_is_flagged(plain):
    model_parts, opt, step = plain
    graphdef, trainable, frozen = model_parts
    poisoned = jax.tree.map(lambda leaf: leaf.at[..., 0].set(jnp.nan), trainable)
    _, _, (log,) = run(step, opt, (graphdef, poisoned, frozen), [batch(rows([9, 7]), 1)])
    assert not log["finite"]


def test_an_update_that_overflows_is_flagged_by_its_own_step(plain):
    model_parts = plain[0]
    opt = optimizer(rate=3e38, decay=100.0)
    _, _, (log,) = run(make_train_step(model_parts[0], opt, mesh=MESH), opt, model_parts, [batch(rows([9, 7]), 1)])
    assert np.isfinite(log["loss_sum"]) and np.isfinite(log["grad_norm"]) and not log["finite"]


def test_evaluation_does_not_depend_on_the_batch_size(plain):
    graphdef, trainable, frozen = plain[0]
    data = rows([2, 35, 10, 7, 20])
    loss, _, count = naive_loss(trainable, frozen, data, graphdef)
    step = make_eval_step(graphdef, mesh=MESH)
    for size in (1, 3):
        padded = jax.tree.map(lambda x, size=size: np.pad(x, ((0, -5 % size), (0, 0))), data)
        batches = [{k: x[None, i : i + size] for k, x in padded.items()} for i in range(0, 5, size)]
        result = evaluate(step, trainable, frozen, batches, mesh=MESH)
        assert result.num_target_tokens == count == 69
        np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
