"""The layout of OUTPUT_DIR, and who may write into one."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import replace_file
from fastjax.train.files import remove_leftovers
from fastjax.train.state import MANIFEST, CheckpointStore

# The first line of config.yaml: only a folder that bears it is ever overwritten.
_MARK = "# A fastjax run; `--config` takes this file."


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

        Raises: UserError if it holds something and neither `resume` nor `overwrite` is asked for, or something that no
          fastjax run wrote; if `resume` names no checkpoint, or one of another run than the folder's.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output_dir={str(self.path)!r} is a file; give a folder")
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
        if checkpoint is not None and self.checkpoints.resolve() != checkpoint.resolve().parent:
            raise UserError(
                f"resume={resume!r} is a checkpoint of another run than the one in output_dir={str(self.path)!r}; "
                "give that run's folder, or an empty one"
            )

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
        """Makes the folder and writes config.yaml; without `keep`, what an earlier run wrote is removed first."""
        import yaml

        if not keep:
            for path in (self.metrics, self.loss_plot):
                path.unlink(missing_ok=True)
            for path in (self.checkpoints, self.tensorboard, self.adapter, self.model):
                if path.exists():
                    shutil.rmtree(path)
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        with replace_file(self.config) as file:
            file.write(f"{_MARK}\n{text}".encode())

    def is_empty(self) -> bool:
        """Whether the folder is absent or holds nothing."""
        return not self.path.exists() or not any(self.path.iterdir())

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
