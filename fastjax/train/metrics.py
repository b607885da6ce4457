"""What a run says about itself: sums over an interval, metrics.jsonl, TensorBoard or Weights & Biases, loss.png."""

import errno
import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import replace_file

Line = dict[str, Any]


@dataclass
class Interval:
    """Sums over the steps since the last logged line.

    Attributes:
      num_skipped: steps of these whose update was skipped; their loss counts nowhere.
      seconds: their wall time; evaluation and saving excluded.
    """

    loss_sum: float = 0.0
    num_target_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_skipped: int = 0
    seconds: float = 0.0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds one step's metrics, as fetched from the device."""
        if metrics["finite"]:
            self.loss_sum += float(metrics["loss_sum"])
            self.num_target_tokens += int(metrics["num_target_tokens"])
        else:
            self.num_skipped += 1
        self.num_tokens += int(metrics["num_tokens"])
        self.num_steps += 1

    def line(self, *, step: int, epoch: float, grad_norm: float, learning_rate: float) -> Line:
        """The interval as an object of metrics.jsonl; loss is the mean over its target tokens, None without any.

        num_skipped is there only if a step was skipped; a grad_norm that is not finite is None.
        """
        loss = self.loss_sum / self.num_target_tokens if self.num_target_tokens else None
        skipped = {"num_skipped": self.num_skipped} if self.num_skipped else {}
        return {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "learning_rate": learning_rate,
            "num_target_tokens": self.num_target_tokens,
            "num_tokens": self.num_tokens,
            "tokens_per_second": self.num_tokens / max(self.seconds, 1e-9),
            "step_time_s": self.seconds / max(self.num_steps, 1),
            "peak_memory_bytes": peak_memory_bytes(),
            **skipped,
        }

    def to_dict(self) -> dict[str, Any]:
        """In a form that JSON takes; `Interval(**d)` gives it back, bit by bit."""
        return asdict(self)


def peak_memory_bytes() -> int | None:
    """The allocator's peak of the fullest local device since the process began; None where it is not counted."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    counted = [peak for peak in peaks if peak is not None]
    return max(counted) if counted else None


class MetricsFile:
    """metrics.jsonl, one object a line, each on the disk's queue as soon as it is written."""

    def __init__(self, path: Path, *, keep_until: int | None = None, write: bool = True) -> None:
        """Args:
        keep_until: drop torn lines and those of later steps; None starts an empty file.
        write: False only keeps the lines: of several processes one writes the file.
        """
        self.lines = [] if keep_until is None else [line for line in read_metrics(path) if line["step"] <= keep_until]
        self._file: Any = None
        self._path = path
        if not write:
            return
        with replace_file(path) as file:
            for line in self.lines:
                file.write((json.dumps(line) + "\n").encode())
        # Unbuffered: what a full disk refuses is not tried again when the file is closed.
        self._file = path.open("ab", buffering=0)

    def write(self, line: Line) -> None:
        """Appends one line, or none of it. Raises: OSError with the file's name."""
        self.lines.append(line)
        if self._file is None:
            return
        text, before = (json.dumps(line, allow_nan=False) + "\n").encode(), os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file.fileno(), before)
            error.filename = str(self._path)
            raise

    def flush(self) -> None:
        """Puts the lines so far on the disk: a checkpoint of their step must not get there before them."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """No line can be written after this."""
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[Line]:
    """The whole lines of a metrics.jsonl; a torn last one (the process was killed) is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class Writer(Protocol):
    """Where lines go beside metrics.jsonl."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    """Through tensorboard's own writer: tensorboardX imports torch where torch is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        # Events of steps that a resumed run does again are hidden from there on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, line: Line) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in _scalars(line).items()]
        self._writer.add_event(Event(wall_time=time.time(), step=line["step"], summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(dir=str(folder), config=dict(config))

    def write(self, line: Line) -> None:
        self._run.log(_scalars(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check_writer(report_to: str) -> None:
    """Raises: UserError if the package that `report_to` needs is not installed; it is not imported yet."""
    package = _PACKAGES.get(report_to)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"report_to={report_to!r} needs the package {package}, which is not installed; "
            "install it, or use report_to=none"
        )


def make_writer(report_to: str, folder: Path, config: Mapping[str, Any], *, step: int) -> Writer | None:
    """The writer that `report_to` names; None for "none".

    Args:
      folder: where it may keep files.
      step: the last step of a resumed run that stands; 0 for a new one.
    """
    if report_to == "tensorboard":
        return _TensorBoard(folder, step)
    if report_to == "wandb":
        return _WeightsAndBiases(folder, config)
    return None


def _scalars(line: Line) -> dict[str, float]:
    kind = "eval" if "eval_loss" in line else "train"
    named = {key.removeprefix("eval_"): value for key, value in line.items() if key != "step"}
    return {f"{kind}/{key}": value for key, value in named.items() if value is not None and math.isfinite(value)}


def plot_loss(lines: list[Line], path: Path) -> None:
    """Draws training and evaluation loss over the steps, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o-")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set(xlabel="optimiser step", ylabel="loss per target token (nats)")
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
    with replace_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
