"""Checkpoints: committed whole or not at all, restored in the same types, refused when they belong elsewhere."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.train import files, state
from fastjax.train.mesh import make_mesh, replicated
from fastjax.train.optim import make_optimizer
from fastjax.train.state import CheckpointStore, TrainState

FINGERPRINT = {"seed": 3, "model": {"hidden_size": 8}, "data": "abc"}


class Layer(nnx.Module):
    def __init__(self):
        self.lora_a = nnx.Param(jnp.arange(6.0).reshape(2, 3))
        self.lora_b = nnx.Param(jnp.ones((2, 2), jnp.bfloat16))


OPTIMIZER = make_optimizer(lambda step: 0.1, weight_decay=0.1)


def fresh():
    trainable = nnx.state(Layer())
    placed = jax.device_put((trainable, OPTIMIZER.init(trainable)), replicated(make_mesh()))
    return TrainState(*placed, jax.random.key(3), 0, {})


@partial(jax.jit, donate_argnums=(0, 1))
def step(trainable, opt_state):
    updates, opt_state = OPTIMIZER.update(jax.tree.map(jnp.ones_like, trainable), opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state


def test_every_step_saved_under_donation_and_the_next_step_needs_no_compilation(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    now = fresh()
    kept = {}
    for number in range(1, 6):
        trainable, opt_state = step(now.trainable, now.opt_state)
        now = TrainState(trainable, opt_state, now.rng, number, {"row": number})
        store.save(now, FINGERPRINT)
        kept[number] = [np.array(leaf) for leaf in jax.tree.leaves((trainable, opt_state))]
    compiled = step._cache_size()
    assert store.steps() == [1, 2, 3, 4, 5]
    for number in (2, 5):
        back = state.restore(store.path(number), fresh(), FINGERPRINT)
        assert (back.step, back.position) == (number, {"row": number})
        template = fresh()
        assert jax.tree.structure((back.trainable, back.opt_state)) == jax.tree.structure(
            (template.trainable, template.opt_state)
        )
        for ours, theirs in zip(jax.tree.leaves((back.trainable, back.opt_state)), kept[number], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert jax.random.key_data(back.rng).tolist() == jax.random.key_data(now.rng).tolist()
        step(back.trainable, back.opt_state)
    assert step._cache_size() == compiled
    assert not np.array_equal(kept[4][0], kept[5][0])


def test_only_the_newest_stay_and_leftovers_do_not_count(tmp_path):
    store = CheckpointStore(tmp_path, save_total_limit=2)
    for number in (3, 20, 100):
        store.save(TrainState(**{**vars(fresh()), "step": number}), FINGERPRINT)
    assert store.steps() == [20, 100]
    (tmp_path / ".200.0123456789ab.tmp").mkdir()
    (tmp_path / "300").mkdir()
    assert store.newest() == (tmp_path / "100", [])
    store.discard_after(20)
    assert store.steps() == [20]
    store.save(TrainState(**{**vars(fresh()), "step": 21}), FINGERPRINT)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, harm):
    store = CheckpointStore(tmp_path)
    for number in (1, 2):
        store.save(TrainState(**{**vars(fresh()), "step": number}), FINGERPRINT)
    file = max(files.files_below(store.path(2) / "arrays"), key=lambda path: path.stat().st_size)
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    if harm == "flip":
        file.write_bytes(contents)
    elif harm == "cut":
        file.write_bytes(contents[:-1])
    else:
        file.unlink()
    path, complaints = store.newest()
    assert path == store.path(1)
    assert file.name in complaints[0]
    with pytest.raises(UserError, match="damaged"):
        state.restore(store.path(2), fresh(), FINGERPRINT)


def test_other_settings_are_named(tmp_path):
    path = CheckpointStore(tmp_path).save(fresh(), FINGERPRINT)
    with pytest.raises(UserError, match=r"model\.hidden_size was 8 and is now 16; seed was 3 and is now 4"):
        state.restore(path, fresh(), {**FINGERPRINT, "seed": 4, "model": {"hidden_size": 16}})


def test_other_shapes_are_named(tmp_path):
    path = CheckpointStore(tmp_path).save(fresh(), FINGERPRINT)
    module = Layer()
    module.lora_a = nnx.Param(jnp.ones((4, 3)))
    trainable = nnx.state(module)
    with pytest.raises(UserError, match=r"trainable.lora_a was \[\[2, 3\]"):
        state.restore(path, TrainState(trainable, OPTIMIZER.init(trainable), jax.random.key(0), 0, {}), FINGERPRINT)


def test_a_failed_save_is_an_error_and_leaves_the_older_ones(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(fresh(), FINGERPRINT)

    def full_disk(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "crc32", full_disk)
    with pytest.raises(OSError, match="No space left"):
        store.save(TrainState(**{**vars(fresh()), "step": 7}), FINGERPRINT)
    assert [p.name for p in tmp_path.iterdir()] == ["0"]


def test_the_manifest_is_plain_json(tmp_path):
    path = CheckpointStore(tmp_path).save(fresh(), FINGERPRINT)
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert manifest["leaves"]["trainable.lora_b"] == [[2, 2], "bfloat16"]
    assert manifest["fingerprint"] == FINGERPRINT


def test_a_limit_of_zero_is_refused(tmp_path):
    with pytest.raises(UserError, match="save_total_limit=0"):
        CheckpointStore(tmp_path, 0)
