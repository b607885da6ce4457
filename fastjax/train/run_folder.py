"""The layout of OUTPUT_DIR, and who may write into one."""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastjax.errors import UserError
from fastjax.hosts.exchange import from_first, this_process
from fastjax.models.checkpoint.files import (
    OUR_FILES,
    check_folder,
    is_leftover,
    remove_leftovers,
    replace_file,
    write_json,
)
from fastjax.train.files import check_room
from fastjax.train.manifest import MANIFEST
from fastjax.train.run_lock import LOCK, check_not_locked, locked
from fastjax.train.state import CheckpointStore

# The first line of config.yaml: only a folder that bears it is ever overwritten.
_MARK = "# A fastjax run; `--config` takes this file."

# In the checkpoint whose result was saved.
_HAS_RESULT = "result.json"

# A network file system may show a new file to other hosts after some time only.
_VISIBLE_WITHIN_S = 60.0

# What TensorBoard and Weights & Biases leave in the folder that they are given.
_EVENTS = ("events.out.tfevents.*", "wandb")


@dataclass(frozen=True)
class RunFolder:
    """OUTPUT_DIR/: config.yaml metrics.jsonl tensorboard/ checkpoints/STEP/ adapter/ or model/ loss.png."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    def check(self, resume: str = "never", overwrite: bool = False) -> None:
        """Whether a run with these settings may use the folder; touches nothing.

        Raises: UserError if no folder can be there or another run is using it; if it holds something and neither
          `resume` nor `overwrite` is asked for, or something that no fastjax run wrote; if `resume` names no
          checkpoint, or one of another run than the folder's.
        """
        check_folder(self.path, "output_dir")
        check_not_locked(self.path)
        checkpoint = None if resume in ("never", "auto") else _checkpoint_at(Path(resume))
        if self.is_empty():
            return
        if resume == "never" and not overwrite:
            raise UserError(
                f"output_dir={str(self.path)!r} is not empty; go on with its run with --resume auto, "
                "delete it with --overwrite_output_dir, or give another folder"
            )
        if not self._is_run():
            raise UserError(f"output_dir={str(self.path)!r} holds files that no fastjax run wrote; give another folder")
        self._check_parts()
        if checkpoint is not None and self.checkpoints.resolve() != checkpoint.resolve().parent:
            raise UserError(
                f"resume={resume!r} is a checkpoint of another run than the one in output_dir={str(self.path)!r}; "
                "give that run's folder, or an empty one"
            )

    def check_shared(self) -> None:
        """Whether all processes of the run see this folder, which the first one has locked.

        Raises: UserError in a process that does not.
        """
        owner = from_first((self.path / LOCK).read_text)
        until = time.monotonic() + _VISIBLE_WITHIN_S
        while not ((self.path / LOCK).is_file() and (self.path / LOCK).read_text() == owner):
            if time.monotonic() > until:
                raise UserError(
                    f"output_dir={str(self.path)!r} is not the same folder for {this_process()} and for process 0; "
                    "give one on a file system that all hosts share"
                )
            time.sleep(0.2)

    def check_room(self, num_bytes: int) -> None:
        """Raises: UserError if the folder's disk has no room for a checkpoint of so many bytes."""
        place = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        try:
            check_room(place, num_bytes)
        except OSError as error:
            raise UserError(
                f"output_dir={str(self.path)!r}: a checkpoint of this run takes {num_bytes / 2**20:.1f} MiB, and "
                f"{place} has no room for it ({error.strerror}); free some space, or give a folder on another disk"
            ) from None

    def find_checkpoint(self, resume: str) -> tuple[Path | None, list[str]]:
        """The checkpoint to go on from, if any, and a word about each damaged newer one.

        Raises: UserError if `resume` names a folder that is no checkpoint.
        """
        if resume == "never":
            return None, []
        if resume == "auto":
            return CheckpointStore(self.checkpoints).newest()
        return _checkpoint_at(Path(resume)), []

    def start(self, config: Mapping[str, Any], *, keep: bool) -> None:
        """Makes the folder and writes config.yaml; without `keep`, what an earlier run wrote is removed first.

        A person's files stay, in every folder of the run. Links are followed.
        """
        import yaml

        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.checkpoints):
            if folder.is_dir():
                remove_leftovers(folder)
        if not keep:
            self._remove_run()
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        with replace_file(self.config) as file:
            file.write(f"{_MARK}\n{text}".encode())

    def has_result(self, method: str, of: Path) -> bool:
        """Whether the adapter, or the model of method=full, of the checkpoint `of` was written whole."""
        written = self.model / "config.json" if method == "full" else self.adapter / "adapter_config.json"
        return written.is_file() and (of / _HAS_RESULT).is_file()

    def mark_result(self, of: Path) -> None:
        """Notes in the checkpoint `of`, and in no other, that the result of its steps is whole.

        Times of files would not tell: a clock may jump.
        """
        for mark in self.checkpoints.glob(f"*/{_HAS_RESULT}"):
            mark.unlink(missing_ok=True)
        write_json(of / _HAS_RESULT, {"step": int(of.name)})

    def is_empty(self) -> bool:
        """Whether the folder is absent or holds nothing."""
        return not self.path.exists() or all(path.name == LOCK or is_leftover(path) for path in self.path.iterdir())

    def lock(self) -> AbstractContextManager[None]:
        """Keeps every other run out of the folder while the block runs, see `run_lock.locked`."""
        return locked(self.path)

    def _check_parts(self) -> None:
        """Raises: UserError if a part of the run is a file where a folder belongs, or the other way round."""
        for path in (self.checkpoints, self.tensorboard, self.adapter, self.model):
            check_folder(path, path.name)
        for path in (self.config, self.metrics, self.loss_plot):
            if os.path.lexists(path) and not path.is_file():
                raise UserError(f"{path} is not a file, and a run writes one there; move it, or give another folder")

    def _remove_run(self) -> None:
        for path in (self.metrics, self.loss_plot):
            path.unlink(missing_ok=True)
        CheckpointStore(self.checkpoints).clear()
        for folder, ours in ((self.tensorboard, _EVENTS), (self.adapter, OUR_FILES), (self.model, OUR_FILES)):
            for path in [path for pattern in ours for path in folder.glob(pattern)]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.tensorboard, self.adapter, self.model):
            if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
                folder.rmdir()

    def _is_run(self) -> bool:
        try:
            return self.config.read_text(encoding="utf-8").startswith(_MARK)
        except (OSError, UnicodeDecodeError):
            return False


def _checkpoint_at(path: Path) -> Path:
    if (path / MANIFEST).is_file():
        return path
    newest = next((n for n in (CheckpointStore(p).newest()[0] for p in (path, path / "checkpoints")) if n), None)
    hint = f"; give {newest}" if newest else "; give a folder OUTPUT_DIR/checkpoints/STEP, or auto"
    raise UserError(f"resume={str(path)!r} is not a checkpoint: it has no {MANIFEST}{hint}")
