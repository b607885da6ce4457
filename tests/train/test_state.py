"""Checkpoints: committed whole or not at all, restored in the same types, refused when they belong elsewhere."""

import json
import shutil
import subprocess
import sys
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.train import files, manifest, state
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


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory):
    """A folder with the checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    for number in (1, 2):
        CheckpointStore(folder).save(TrainState(**{**vars(fresh()), "step": number}), FINGERPRINT)
    return folder


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


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: None,
        lambda manifest: [],
        lambda manifest: {"files": []},
        lambda manifest: {**manifest, "position": {"row": 1}},
        lambda manifest: {**manifest, "step": "2"},
        lambda manifest: {**manifest, "files": {"arrays": [0, 0, 0]}},
        lambda manifest: {key: value for key, value in manifest.items() if key != "leaves"},
        "copied",
    ],
)
def test_a_manifest_that_save_did_not_write_there_is_passed_over_and_named(tmp_path, saved_twice, change):
    shutil.copytree(saved_twice, tmp_path / "run")
    store, name = CheckpointStore(tmp_path / "run"), "2"
    if change == "copied":
        name = "30"
        shutil.copytree(store.path(2), store.path(30))
        shutil.rmtree(store.path(2))
    else:
        file = store.path(2) / state.MANIFEST
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    path, complaints = store.newest()
    assert path == store.path(1)
    assert len(complaints) == 1 and f"{tmp_path / 'run' / name}: checkpoint.json" in complaints[0]


def test_folders_whose_names_are_no_step_are_left_alone(tmp_path, saved_twice):
    shutil.copytree(saved_twice, tmp_path / "run")
    for name in ("²", "٥", "007", "2.5", "-3"):
        shutil.copytree(saved_twice / "2", tmp_path / "run" / name)
    assert CheckpointStore(tmp_path / "run").steps() == [1, 2]


# A process of its own: TensorStore's threads go on complaining after the save has failed, whenever they like.
_FILL_THE_DISK = """
import sys
import jax, optax
from fastjax.train.state import CheckpointStore, TrainState

store = CheckpointStore(__import__("pathlib").Path(sys.argv[1]))
for step, size in ((0, 10), (7, 300_000)):
    tree = {"noise": jax.random.normal(jax.random.key(0), (size,))}
    try:
        store.save(TrainState(tree, optax.adam(1e-3).init(tree), jax.random.key(3), step, {}), {"seed": 3})
    except OSError as error:
        print("REFUSED", step, error.errno, error.filename)
print("LEFT", *(p.name for p in store.folder.iterdir()), store.newest() == (store.path(0), []))
"""


def test_a_full_disk_is_an_os_error_with_the_path_and_leaves_the_older_ones(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        command = [sys.executable, "-c", _FILL_THE_DISK, tmp_path / "checkpoints"]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("REFUSED", "LEFT"))]
    assert lines[1:] == ["LEFT 0 True"], done.stderr
    assert lines[0].startswith("REFUSED 7 28 ") and "checkpoints" in lines[0]


def test_a_save_goes_on_while_its_buffers_are_donated_and_is_there_after_waiting(tmp_path):
    store = CheckpointStore(tmp_path)
    tree = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    opt_state = OPTIMIZER.init(tree)
    expected = np.array(tree["w"])
    path = store.begin(TrainState(tree, opt_state, jax.random.key(3), 1, {}), FINGERPRINT)
    # The next step writes into the same memory, as often as the save takes.
    for _ in range(20):
        tree, opt_state = step(tree, opt_state)
    assert not np.array_equal(tree["w"], expected)
    store.wait()
    assert state.damage(path) is None
    back = state.restore(path, TrainState(tree, opt_state, jax.random.key(0), 0, {}), FINGERPRINT)
    np.testing.assert_array_equal(back.trainable["w"], expected)


def test_a_save_that_fails_in_the_background_is_reported_at_the_next_look_and_once(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    failed = threading.Event()

    def full_disk(path):
        failed.set()
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", full_disk)
        store.begin(fresh(), FINGERPRINT)
        assert failed.wait(60)
        store._saving._thread.join()
        with pytest.raises(OSError, match="No space left"):
            store.check()
    store.check()
    store.wait()
    assert list(tmp_path.iterdir()) == []
    store.save(fresh(), FINGERPRINT)
    assert store.steps() == [0]


def test_an_abandoned_save_leaves_nothing(tmp_path, monkeypatch):
    store, go_on = CheckpointStore(tmp_path), threading.Event()
    real = files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: go_on.wait(60) and real(path))
    store.begin(fresh(), FINGERPRINT)
    thread = store._saving._thread
    store.abandon()
    go_on.set()
    thread.join()
    assert list(tmp_path.iterdir()) == []


def test_the_best_checkpoint_stays_whatever_its_age(tmp_path):
    store = CheckpointStore(tmp_path, save_total_limit=2)
    for number, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        store.best = best
        store.save(TrainState(**{**vars(fresh()), "step": number}), FINGERPRINT)
    assert store.steps() == [5, 6]
    store.best = 5
    for number in (7, 8):
        store.save(TrainState(**{**vars(fresh()), "step": number}), FINGERPRINT)
    assert store.steps() == [5, 8]


def test_settings_that_may_be_overridden_are_and_the_message_says_how(tmp_path):
    path = CheckpointStore(tmp_path).save(fresh(), {**FINGERPRINT, "learning_rate": 1.0})
    now = {**FINGERPRINT, "learning_rate": 2.0}
    with pytest.raises(UserError, match="learning_rate was 1.0 and is now 2.0.*--resume_override learning_rate"):
        state.restore(path, fresh(), now)
    assert state.restore(path, fresh(), now, override=("learning_rate",)).step == 0
    with pytest.raises(UserError, match="seed was 3 and is now 4") as error:
        state.restore(path, fresh(), {**now, "seed": 4}, override=("learning_rate",))
    assert "resume_override" not in str(error.value) and "learning_rate" not in str(error.value)


def test_a_checkpoint_of_another_release_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 1)
        path = CheckpointStore(tmp_path).save(fresh(), FINGERPRINT)
    with pytest.raises(UserError, match="has format 1, and this release reads format 2"):
        state.restore(path, fresh(), FINGERPRINT)


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

    monkeypatch.setattr(files, "sha256", full_disk)
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
