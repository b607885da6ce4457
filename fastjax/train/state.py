"""What an interrupted run needs to go on bit-equal, saved through Orbax.

    checkpoints/STEP/arrays/          Orbax: trainable leaves, optimiser state, PRNG key, each under its dotted name
    checkpoints/STEP/checkpoint.json  step, data position, fingerprint, shape of every leaf, size and CRC of every file,
                                      and a CRC of all that

A folder bears its number only once it is complete. Saving is synchronous: the next step donates these buffers, and on
a CPU the "copy" on the host is a view of them.
"""

import errno
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import remove_leftovers, replace_folder, write_json
from fastjax.train import files
from fastjax.train.optim import parameter_name

_FORMAT = 1
MANIFEST = "checkpoint.json"

# Parts of a fingerprint whose values say nothing to a person.
_CHECKSUMS = {
    "data": "the tokenised rows are others: look at data, max_seq_length, train_on, long_rows, packing, the tokenizer",
    "base_weights": "the base model's weights are others",
}


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
    """The folder `checkpoints` of one run."""

    def __init__(self, folder: Path, save_total_limit: int | None = None) -> None:
        """Args: save_total_limit: how many checkpoints stay, the oldest going first; None keeps all."""
        if save_total_limit is not None and save_total_limit < 1:
            raise UserError(f"save_total_limit={save_total_limit} must be 1 or more; leave it out to keep everything")
        self.folder = folder
        self.save_total_limit = save_total_limit
        # The step that `save_total_limit` never removes.
        self.best: int | None = None

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir() if (path / MANIFEST).is_file()]
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / str(step)

    def save(self, state: TrainState, fingerprint: Mapping[str, Any]) -> Path:
        """Writes the state, then removes what exceeds `save_total_limit`.

        Raises: OSError (a full or read-only disk); nothing half-written stays and older checkpoints are untouched.
        """
        import orbax.checkpoint as ocp

        arrays = _named_leaves(state)
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.path(state.step)
        remove_leftovers(self.folder)
        with replace_folder(final, overwrite=True, ours=("arrays", MANIFEST)) as temporary:
            with _disk_errors(final), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                checkpointer.save((temporary / "arrays").absolute(), args=ocp.args.StandardSave(arrays))
            manifest = {
                "format": _FORMAT,
                "step": state.step,
                "position": state.position,
                "fingerprint": fingerprint,
                "leaves": {name: _describe(leaf) for name, leaf in arrays.items()},
                "files": {
                    str(file.relative_to(temporary)): [file.stat().st_size, files.crc32(file)]
                    for file in files.files_below(temporary)
                },
            }
            write_json(temporary / MANIFEST, {**manifest, "crc": _crc_of(manifest)})
            files.flush(temporary)
        if self.save_total_limit is not None:
            for step in self.steps()[: -self.save_total_limit]:
                if step not in (state.step, self.best):
                    files.remove_folder(self.path(step))
        return final

    def discard_after(self, step: int) -> None:
        """Removes checkpoints later than `step`: a run that goes on from there writes its own."""
        for later in self.steps():
            if later > step:
                files.remove_folder(self.path(later))

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose files are all as written, and a word about each newer one that is not."""
        complaints: list[str] = []
        for step in reversed(self.steps()):
            complaint = damage(self.path(step))
            if complaint is None:
                return self.path(step), complaints
            complaints.append(complaint)
        return None, complaints


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Orbax itself does not notice a flipped bit."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{checkpoint}: {MANIFEST} cannot be read ({error})"
    # With its own checksum it is what `save` wrote, so that no key's presence or type has to be asked for.
    if not isinstance(manifest, dict) or manifest.pop("crc", None) != _crc_of(manifest):
        return f"{checkpoint}: {MANIFEST} is not as it was written"
    if checkpoint.resolve().name != str(manifest["step"]):
        return f"{checkpoint}: {MANIFEST} is that of step {manifest['step']}"
    for name, (size, crc) in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file():
            return f"{checkpoint}: {name} is missing"
        if file.stat().st_size != size or files.crc32(file) != crc:
            return f"{checkpoint}: {name} is not as it was written"
    return None


def restore(checkpoint: Path, template: TrainState, fingerprint: Mapping[str, Any]) -> TrainState:
    """The saved state in the template's container types, dtypes and shardings.

    Args:
      template: a freshly initialised state of the run that wants to go on.
      fingerprint: that run's; it must equal the saved one.
    Raises: UserError for a damaged checkpoint, one of other settings (the differences are named), or of other shapes.
    """
    import orbax.checkpoint as ocp

    complaint = damage(checkpoint)
    if complaint is not None:
        raise UserError(f"this checkpoint is damaged: {complaint}; resume from an older one, or start anew")
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != _FORMAT:
        raise UserError(f"{checkpoint} has format {manifest['format']}; this release reads {_FORMAT}")
    differing = differences(manifest["fingerprint"], fingerprint)
    if differing:
        raise UserError(
            f"{checkpoint} was saved by a run with other settings: {'; '.join(differing)}. "
            "Give the settings of that run, or start a new one in another output_dir, whose --adapter may be this "
            "run's adapter"
        )
    leaves = _named_leaves(template)
    differing = differences(manifest["leaves"], {name: _describe(leaf) for name, leaf in leaves.items()})
    if differing:
        raise UserError(f"{checkpoint} holds other tensors than this run trains: {'; '.join(differing[:5])}")
    target = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in leaves.items()}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore((checkpoint / "arrays").absolute(), args=ocp.args.StandardRestore(target))
    trees = {"trainable": template.trainable, "opt_state": template.opt_state}
    restored = {
        prefix: jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in _names(prefix, tree)])
        for prefix, tree in trees.items()
    }
    rng = jax.random.wrap_key_data(arrays["rng"], impl=jax.random.key_impl(template.rng))
    return TrainState(restored["trainable"], restored["opt_state"], rng, manifest["step"], manifest["position"])


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each setting that two fingerprints do not share, nested ones under dotted names."""
    found = []
    saved, now = json.loads(json.dumps(saved)), json.loads(json.dumps(now))
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new and key in _CHECKSUMS:
            found.append(f"{_CHECKSUMS[key]} (checksum {old} then, {new} now)")
        elif old != new:
            found.append(f"{prefix}{key} was {old!r} and is now {new!r}")
    return found


def _crc_of(manifest: Mapping[str, Any]) -> int:
    """CRC-32 of what JSON keeps of the manifest."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(manifest)), sort_keys=True).encode())


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Gives the OSError that TensorStore's ValueError stands for, and keeps Orbax from logging its traceback."""

    def silent(record: logging.LogRecord) -> bool:
        return "raised an exception" not in record.getMessage()

    log = logging.getLogger("absl")
    log.addFilter(silent)
    try:
        yield
    except ValueError as error:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        if not found and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        code = int(found[1]) if found else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path)) from error
    finally:
        log.removeFilter(silent)


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
