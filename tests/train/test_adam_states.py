"""AdamW with 8-bit moments against bitsandbytes, both small states against float32 AdamW, and what a resume keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fastjax.models.lora import split_trainable
from fastjax.train.adam_states import scale_by_adam_8bit, stochastically_rounded
from fastjax.train.mesh import make_mesh, put_batch, replicated
from fastjax.train.optim import make_optimizer, step_count
from fastjax.train.schedule import make_schedule
from fastjax.train.state import CheckpointStore, TrainState, restore
from fastjax.train.step import make_train_step

DECAY, RATE = 0.1, 1e-3


def tree(rng, draw):
    """Whole blocks, a partial last block, and a leaf that is too small for 8 bits."""
    return {name: draw(rng, shape).astype(np.float32) for name, shape in SHAPES.items()}


SHAPES = {"lora_a": (16, 300), "lora_b": (512, 16), "small": (63, 65)}


@pytest.fixture(scope="module")
def update():
    optimizer = make_optimizer(lambda step: RATE, optim="adamw_8bit", weight_decay=DECAY, max_grad_norm=None)

    @jax.jit
    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, update


def test_every_step_is_that_of_bitsandbytes(update):
    """Each step of both starts from the same parameters and 8-bit moments."""
    import torch
    from bitsandbytes.optim import AdamW8bit

    optimizer, update = update
    rng = np.random.default_rng(0)
    params = tree(rng, lambda rng, shape: rng.normal(size=shape))
    state = optimizer.init(params)
    tensors = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in params.items()}
    reference = AdamW8bit(tensors.values(), lr=RATE, weight_decay=DECAY)
    for _ in range(4):
        gradients = tree(rng, lambda rng, shape: rng.normal(size=shape) * np.exp(rng.normal(-6, 2, shape)))
        params, state = update(params, state, gradients)
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradients[name])
        reference.step()
        adam = state[1]
        for name, tensor in tensors.items():
            theirs = reference.state[tensor]
            np.testing.assert_allclose(params[name], tensor.detach().numpy(), rtol=2e-6, atol=2e-8)
            for moments, number in ((adam.mu, 1), (adam.nu, 2)):
                codes, absmax = moments.values[name], moments.absmax[name]
                if name == "small":
                    assert absmax is None and codes.dtype == jnp.float32
                    np.testing.assert_allclose(codes, theirs[f"state{number}"].numpy(), rtol=5e-6, atol=1e-9)
                    continue
                np.testing.assert_allclose(absmax.reshape(-1), theirs[f"absmax{number}"].numpy(), rtol=1e-6)
                # Their CPU library rounds through a table of steps of 3e-5 of a block's scale, ours exactly.
                table = theirs[f"qmap{number}"].numpy()
                ours, others = table[np.asarray(codes)], table[theirs[f"state{number}"].numpy()]
                same = ours == others
                assert np.mean(same[np.abs(ours) > 1e-2]) > 0.99
                assert np.abs(ours - others).max() <= np.diff(table).max() * 1.01
                theirs[f"state{number}"].copy_(torch.tensor(np.asarray(codes)))
                theirs[f"absmax{number}"].copy_(torch.tensor(np.asarray(absmax.reshape(-1))))
            tensor.data.copy_(torch.tensor(np.asarray(params[name])))
    assert int(step_count(state)) == 4


def test_size_limit_and_blocks_are_those_of_one_layer():
    params = {"layers": {"a": jnp.ones((2, 64, 65)), "norm": jnp.ones((2, 3000))}, "head": jnp.ones((2, 3000))}
    adam = make_optimizer(lambda step: RATE, optim="adamw_8bit").init(params)[1]
    assert adam.mu.absmax["layers"]["a"].shape == (2, 17)
    assert adam.nu.absmax["layers"]["norm"] is None and adam.nu.values["layers"]["norm"].dtype == jnp.float32
    assert adam.mu.absmax["head"].shape == (24,)


def test_eight_bit_states_take_two_bytes_a_parameter():
    state = jax.eval_shape(scale_by_adam_8bit(0.9, 0.999, 1e-8).init, jnp.zeros((4096, 1024)))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / 4096 / 1024 < 2.04


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average():
    values = jnp.asarray([1.0, 1.001, 1.0 + 2**-8, 3e-12, 0.0, np.inf], jnp.float32)
    bits = jax.random.bits(jax.random.key(0), (40000, 6), jnp.uint16)
    rounded = np.asarray(stochastically_rounded(jnp.broadcast_to(values, bits.shape), bits), np.float64)
    assert [len(np.unique(column)) for column in rounded.T] == [1, 2, 2, 2, 1, 1]
    np.testing.assert_allclose(rounded.mean(0), values, rtol=1e-4)


def test_a_second_moment_in_bfloat16_still_grows():
    """Rounded to nearest it would stay where 0.001 (g^2 - v) is less than half of its last place."""
    optimizer = make_optimizer(lambda step: 0.0, optim="adamw_bf16", max_grad_norm=None)
    params = jnp.zeros((64, 64))

    def step(state, _):
        return optimizer.update(jnp.ones_like(params), state, params)[1], None

    state = jax.jit(lambda state: jax.lax.scan(step, state, length=1000)[0])(optimizer.init(params))
    assert {leaf.dtype for leaf in jax.tree.leaves(state[1].nu)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(np.mean(np.asarray(state[1].nu, np.float64)), 1 - 0.999**1000, rtol=2e-3)


def batch(seed):
    ids = np.random.default_rng(seed).integers(1, 99, (1, 2, 16)).astype(np.int32)
    return {"input_ids": ids, "loss_mask": np.ones_like(ids, bool), "segment_ids": np.ones_like(ids)}


def trainer(model, optim, total=40):
    graphdef, trainable, frozen = split_trainable(model, "full")
    mesh = make_mesh()
    trainable, frozen = jax.device_put((trainable, frozen), replicated(mesh))
    schedule = make_schedule("linear", 1e-3, warmup_steps=4, total_steps=total)
    optimizer = make_optimizer(schedule, optim=optim, weight_decay=0.01)
    opt_state = jax.jit(optimizer.init, out_shardings=replicated(mesh))(trainable)
    step = make_train_step(graphdef, optimizer, mesh=mesh)

    def run(trainable, opt_state, steps):
        losses = []
        for number in steps:
            data = put_batch(batch(number % 3), mesh)
            trainable, opt_state, metrics = step(trainable, opt_state, frozen, data, jax.random.key(0))
            losses.append(metrics["loss_sum"] / metrics["num_target_tokens"])
        return trainable, opt_state, np.asarray(losses)

    return run, trainable, opt_state


@pytest.fixture(scope="module")
def tiny(tiny_hf):
    """Two layers whose projections have 4096 weights and more."""
    return tiny_hf(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, head_dim=16)


def test_small_states_converge_as_float32_does(tiny, from_hf_model):
    curves = {}
    for optim in ("adamw", "adamw_8bit", "adamw_bf16"):
        run, trainable, opt_state = trainer(from_hf_model(tiny), optim)
        curves[optim] = run(trainable, opt_state, range(40))[2]
    exact = curves.pop("adamw")
    assert exact[-3:].mean() < 0.75 * exact[0]
    for optim, curve in curves.items():
        np.testing.assert_allclose(curve[-3:].mean(), exact[-3:].mean(), rtol=0.01, err_msg=optim)
        assert np.abs(curve - exact).max() > 0, optim


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_bf16"])
def test_a_saved_state_goes_on_bit_equal(optim, tiny, from_hf_model, tmp_path):
    run, trainable, opt_state = trainer(from_hf_model(tiny), optim)
    trainable, opt_state, _ = run(trainable, opt_state, range(3))
    state = TrainState(trainable, opt_state, jax.random.key(0), 3, {})
    template = TrainState(*jax.tree.map(jnp.zeros_like, (trainable, opt_state)), jax.random.key(1), 0, {})
    saved = CheckpointStore(tmp_path / "checkpoints").save(state, {})
    whole = run(trainable, opt_state, range(3, 5))
    restored = restore(saved, template, {})
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(template.opt_state)
    again = run(restored.trainable, restored.opt_state, range(3, 5))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(again[0]), nnx.to_pure_dict(whole[0]))
    jax.tree.map(np.testing.assert_array_equal, again[1], whole[1])
