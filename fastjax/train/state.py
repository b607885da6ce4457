"""What an interrupted run needs to go on bit-equal, saved through Orbax while the next steps run.

    checkpoints/STEP/arrays/          Orbax: trainable leaves, optimiser state, PRNG key, each under its dotted name
    checkpoints/STEP/checkpoint.json  step, data position, fingerprint, shape of every leaf, size and SHA-256 of every
                                      file, and a SHA-256 of all that

A folder bears its number only once it is complete.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fastjax.errors import UserError
from fastjax.hosts.exchange import from_first, is_first
from fastjax.models.checkpoint.files import remove_leftovers
from fastjax.train import files
from fastjax.train.manifest import MANIFEST, damage, read_manifest
from fastjax.train.optim import parameter_name
from fastjax.train.resume import differences, override_hint
from fastjax.train.saving import ARRAYS, Saving


@dataclass(frozen=True)
class TrainState:
    """One moment between two optimiser steps.

    Attributes:
      trainable, opt_state: pytrees of arrays.
      rng: the run's PRNG key; the key of a step is derived from it and the step.
      step: optimiser steps done.
      position: JSON-able; where the data stand, and whatever else the loop needs on the host.
    """

    trainable: Any
    opt_state: Any
    rng: jax.Array
    step: int
    position: dict[str, Any]


class CheckpointStore:
    """The folder `checkpoints` of one run.

    Attributes:
      best: the step that `save_total_limit` never removes, or None.
    """

    def __init__(self, folder: Path, save_total_limit: int | None = None) -> None:
        """Args: save_total_limit: how many checkpoints stay, the oldest going first; None keeps all."""
        if save_total_limit is not None and save_total_limit < 1:
            raise UserError(f"save_total_limit={save_total_limit} must be 1 or more; leave it out to keep everything")
        self.folder = folder
        self.save_total_limit = save_total_limit
        self.best: int | None = None
        self._saving: Saving | None = None

    def steps(self) -> list[int]:
        """The steps of all checkpoints that have their manifest, ascending."""
        return [step for step in self._numbered() if (self.path(step) / MANIFEST).is_file()]

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / str(step)

    def begin(self, state: TrainState, fingerprint: Mapping[str, Any]) -> Path:
        """Starts to save the state, and returns the checkpoint's folder, which is there after `wait`.

        Of several processes all must call this, for the same state, and each writes what lies on its devices.

        The state's arrays may be donated as soon as this returns. An earlier save is waited for. Once this one is
        complete, what exceeds `save_total_limit` is removed.

        Raises: OSError (a full or read-only disk) of this save's beginning or of an earlier one; nothing half-written
          stays and older checkpoints are untouched.
        """
        self.wait()
        arrays = _named_leaves(state)
        contents = {
            "step": state.step,
            "position": state.position,
            "fingerprint": fingerprint,
            "leaves": {name: _describe(leaf) for name, leaf in arrays.items()},
        }
        if self.folder.is_dir() and is_first():
            remove_leftovers(self.folder)
        final = self.path(state.step)
        self._saving = Saving(final, arrays, contents, then=lambda: self._keep_only(state.step))
        return final

    def check(self) -> None:
        """Raises: OSError if a save has failed since the last look."""
        if self._saving is not None and self._saving.check():
            self._saving = None

    def wait(self) -> None:
        """Returns when no save is on its way. Raises: OSError if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def abandon(self) -> None:
        """Lets a save that is on its way come to nothing, without waiting for it."""
        if self._saving is not None:
            self._saving.abandon()
        self._saving = None

    def save(self, state: TrainState, fingerprint: Mapping[str, Any]) -> Path:
        """`begin` and `wait` in one."""
        final = self.begin(state, fingerprint)
        self.wait()
        return final

    def discard_after(self, step: int) -> None:
        """Removes checkpoints later than `step`: a run that goes on from there writes its own."""
        for later in self._numbered():
            if later > step:
                files.remove_folder(self.path(later))

    def clear(self) -> None:
        """Removes every checkpoint."""
        self.discard_after(-1)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose files are all as written, and a word about each newer one that is not."""
        complaints: list[str] = []
        for step in reversed(self._numbered()):
            complaint = damage(self.path(step))
            if complaint is None:
                return self.path(step), complaints
            complaints.append(complaint)
        return None, complaints

    def _numbered(self) -> list[int]:
        """The steps of all folders that `begin` has ever finished, ascending, files having been lost since or not."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name)]
        return sorted(int(path.name) for path in found if (path / MANIFEST).exists() or (path / ARRAYS).exists())

    def _keep_only(self, newest: int) -> None:
        """Removes the oldest checkpoints until `save_total_limit` are left, the newest and the best among them."""
        if self.save_total_limit is None:
            return
        kept = {newest, self.best} if self.best is not None else {newest}
        steps = self.steps()
        excess = len(steps) - max(self.save_total_limit, len(kept & set(steps)))
        for step in [step for step in steps if step not in kept][: max(excess, 0)]:
            files.remove_folder(self.path(step))


def restore(
    checkpoint: Path, template: TrainState, fingerprint: Mapping[str, Any], override: tuple[str, ...] = ()
) -> TrainState:
    """The saved state in the template's container types, dtypes and shardings.

    Args:
      template: a freshly initialised state of the run that wants to go on.
      fingerprint: that run's; it must equal the saved one.
      override: names of `config.OVERRIDABLE` in which it need not.
    Raises: UserError for a damaged checkpoint, one of other settings (the differences are named), or of other shapes.
    """
    import orbax.checkpoint as ocp

    complaint = from_first(lambda: damage(checkpoint))
    if complaint is not None:
        raise UserError(f"this checkpoint is damaged: {complaint}; resume from an older one, or start anew")
    manifest = read_manifest(checkpoint)
    differing = differences(manifest["fingerprint"], fingerprint, without=override)
    if differing:
        raise UserError(
            f"{checkpoint} was saved by a run with other settings: {'; '.join(differing)}. "
            f"Give the settings of that run{override_hint(manifest['fingerprint'], fingerprint, override)}, or start a "
            "new one in another output_dir, whose --adapter may be this run's adapter"
        )
    leaves = _named_leaves(template)
    differing = differences(manifest["leaves"], {name: _describe(leaf) for name, leaf in leaves.items()})
    if differing:
        raise UserError(f"{checkpoint} holds other tensors than this run trains: {'; '.join(differing[:5])}")
    target = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in leaves.items()}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore((checkpoint / ARRAYS).absolute(), args=ocp.args.StandardRestore(target))
    trees = {"trainable": template.trainable, "opt_state": template.opt_state}
    restored = {
        prefix: jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in _names(prefix, tree)])
        for prefix, tree in trees.items()
    }
    rng = jax.random.wrap_key_data(arrays["rng"], impl=jax.random.key_impl(template.rng))
    return TrainState(restored["trainable"], restored["opt_state"], rng, manifest["step"], manifest["position"])


def num_bytes(state: TrainState) -> int:
    """What the arrays of a checkpoint take on the disk, in bytes, at most."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in _named_leaves(state).values())


def _named_leaves(state: TrainState) -> dict[str, jax.Array]:
    named: dict[str, jax.Array] = {"rng": jax.random.key_data(state.rng)}
    for prefix, tree in (("trainable", state.trainable), ("opt_state", state.opt_state)):
        names = _names(prefix, tree)
        assert len(set(names)) == len(names), "two leaves of the training state share a name"
        named.update(zip(names, jax.tree.leaves(tree), strict=True))
    return named


def _names(prefix: str, tree: Any) -> list[str]:
    return [f"{prefix}.{parameter_name(path)}" for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _describe(leaf: jax.Array) -> list[Any]:
    return [list(leaf.shape), str(np.dtype(leaf.dtype))]
