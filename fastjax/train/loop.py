"""The training loop: batches in, checkpoints and metrics out, around the pure step."""

import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from fastjax.errors import Interrupted, NumericsError, UserError
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, split_trainable
from fastjax.models.remat import check_policy
from fastjax.train.config import TrainConfig
from fastjax.train.data import Batches, TokenisedDataset, eval_batches, steps_per_epoch, train_batches
from fastjax.train.evaluate import EvalResult, evaluate
from fastjax.train.interrupts import StopSignals
from fastjax.train.mesh import make_mesh, num_batch_shards, put_batch, replicated
from fastjax.train.metrics import Interval, MetricsFile, check_writer, make_writer, plot_loss
from fastjax.train.optim import make_optimizer
from fastjax.train.run_folder import RunFolder
from fastjax.train.schedule import make_schedule, num_warmup_steps, total_optimizer_steps
from fastjax.train.state import CheckpointStore, TrainState, restore
from fastjax.train.step import make_eval_step, make_train_step


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
      step: optimiser steps done, those before a resume included.
      loss: mean loss of a target token over the last logged interval; None if nothing was logged.
      evaluation: the last evaluation, if there was one.
      num_target_tokens, num_tokens, seconds: of this process.
    """

    step: int
    loss: float | None
    evaluation: EvalResult | None
    num_target_tokens: int
    num_tokens: int
    seconds: float


class Trainer:
    """One run over one model; `train` does it."""

    def __init__(
        self,
        model: CausalLM,
        config: TrainConfig,
        rows: TokenisedDataset,
        eval_rows: TokenisedDataset | None = None,
        *,
        lora: LoraConfig | None = None,
        mesh: Mesh | None = None,
        finish: Callable[[CausalLM, RunFolder], None] | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
          model: with its adapters for method=lora. After `train`, also an interrupted one, it holds the trained
            weights; while it runs its trainable arrays are donated.
          lora: what the adapters were made from; a resumed run must have the same.
          mesh: None makes the one that `config.mesh` names.
          finish: called with the trained model once all steps are done, to save the result.
        Raises: UserError for settings that cannot be.
        """
        self.model, self.config, self.rows, self.eval_rows, self.finish = model, config, rows, eval_rows, finish
        self.mesh = mesh or make_mesh(config.data_parallel_size)
        shards = num_batch_shards(self.mesh)
        self.batch_size = config.per_device_train_batch_size * shards
        self.eval_batch_size = config.per_device_eval_batch_size * shards
        self.steps_per_epoch = steps_per_epoch(len(rows), self.batch_size, config.gradient_accumulation_steps)
        self.total_steps = total_optimizer_steps(self.steps_per_epoch, config.num_train_epochs, config.max_steps)
        self.schedule = make_schedule(
            config.lr_scheduler_type,
            config.learning_rate,
            warmup_steps=num_warmup_steps(self.total_steps, config.warmup_steps, config.warmup_ratio),
            total_steps=self.total_steps,
        )
        self.optimizer = make_optimizer(
            self.schedule,
            optim=config.optim,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_epsilon=config.adam_epsilon,
        )
        check_writer(config.report_to)
        check_policy(config.remat)
        self.folder = RunFolder(Path(config.output_dir))
        self.store = CheckpointStore(self.folder.checkpoints, config.save_total_limit)
        self.fingerprint = {
            "model": model.config.to_hf(),
            "base_weights": _weights_sample(model),
            "dtype": model.dtype.name,
            "method": config.method,
            "adapter": None if lora is None else asdict(lora),
            "data": rows.fingerprint,
            "seed": config.seed,
            "rows_per_micro_batch": self.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
        }

    def train(self) -> TrainResult:
        """Trains from the start, or from the checkpoint that `config.resume` names, to the last step.

        Raises: UserError for a folder or checkpoint that does not fit; NumericsError when a loss or gradient is NaN or
          infinite; Interrupted after SIGINT or SIGTERM, the state having been saved.
        """
        config = self.config
        self.folder.check(config.resume, config.overwrite_output_dir)
        checkpoint, complaints = self.folder.find_checkpoint(config.resume)
        if complaints and checkpoint is None:
            raise UserError(f"no whole checkpoint is left: {'; '.join(complaints)}; start anew without resume")
        for complaint in complaints:
            print(f"passed over a damaged checkpoint: {complaint}", file=sys.stderr)
        graphdef, trainable, frozen = split_trainable(self.model, config.method)
        state = self._initial_state(trainable, checkpoint)
        frozen = jax.device_put(frozen, replicated(self.mesh))
        # Lets go of the initial values that a checkpoint has replaced.
        nnx.update(self.model, state.trainable, frozen)
        del trainable
        batches = train_batches(
            self.rows,
            batch_size=self.batch_size,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed,
        )
        if state.position:
            batches.set_state(state.position["data"])
        # Everything that can be refused has been; from here on the folder changes.
        self.folder.start(config.to_dict(), keep=checkpoint is not None)
        self.store.discard_after(state.step)
        run = _Run(self, graphdef, frozen, state, batches)
        try:
            with StopSignals() as stop:
                result = run.steps(stop)
                if self.finish is not None:
                    nnx.update(self.model, run.trainable)
                    self.finish(self.model, self.folder)
        finally:
            run.close()
            nnx.update(self.model, run.trainable)
        return result

    def _initial_state(self, trainable: Any, checkpoint: Path | None) -> TrainState:
        everywhere = replicated(self.mesh)
        trainable = jax.device_put(trainable, everywhere)
        rng = jax.device_put(jax.random.key(self.config.seed), everywhere)
        if checkpoint is None:
            opt_state = jax.jit(self.optimizer.init, out_shardings=everywhere)(trainable)
            return TrainState(trainable, opt_state, rng, 0, {})
        shapes = jax.eval_shape(self.optimizer.init, trainable)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)
        state = restore(checkpoint, TrainState(trainable, shapes, rng, 0, {}), self.fingerprint)
        if state.step > self.total_steps:
            raise UserError(
                f"{checkpoint} is at step {state.step}, and this run ends at {self.total_steps}; "
                "raise max_steps or num_train_epochs"
            )
        return state


class _Run:
    """The moving parts of one `train` call."""

    def __init__(self, trainer: Trainer, graphdef: Any, frozen: Any, state: TrainState, batches: Batches) -> None:
        self.trainer, self.config, self.mesh, self.batches = trainer, trainer.config, trainer.mesh, batches
        self.frozen, self.trainable, self.opt_state = frozen, state.trainable, state.opt_state
        self.rng, self.step = state.rng, state.step
        self.interval = Interval(**state.position.get("interval", {}))
        self.saved_at = state.step if state.position else None
        self.evaluation: EvalResult | None = None
        self.num_target_tokens = self.num_tokens = 0
        # Steps that the device may still be at: (step, their metrics there).
        self.pending: deque[tuple[int, Any]] = deque()
        self.train_step = make_train_step(graphdef, trainer.optimizer, mesh=self.mesh, remat=self.config.remat)
        self.eval_step = make_eval_step(graphdef, mesh=self.mesh)
        folder = trainer.folder
        self.writer = make_writer(self.config.report_to, folder.tensorboard, self.config.to_dict(), step=self.step)
        self.log = MetricsFile(folder.metrics, keep_until=self.step if state.position else None)
        self.bar = tqdm(total=trainer.total_steps, initial=self.step, unit="step", dynamic_ncols=True)

    def steps(self, stop: StopSignals) -> TrainResult:
        """All steps that are left, with their logging, evaluating and saving."""
        begin = time.perf_counter()
        self.since = begin - self.interval.seconds
        every, total = self.config.logging_steps, self.trainer.total_steps
        # A run that was stopped between a step and its evaluation still owes it.
        self._evaluate_if_due(stop)
        while self.step < total and not stop:
            batch = put_batch(next(self.batches), self.mesh)
            self.trainable, self.opt_state, metrics = self.train_step(
                self.trainable, self.opt_state, self.frozen, batch, self.rng
            )
            self.step += 1
            self.bar.update()
            self.pending.append((self.step, metrics))
            # One step behind, so that the device never waits for the host to read and write numbers.
            if (self.step - 1) % every == 0:
                self._settle(until=self.step - 1)
            self._evaluate_if_due(stop)
            if self.step % self.config.save_steps == 0 or self.step == total:
                self._save()
        self._settle()
        if stop and self.step < total:
            self._save()
            assert stop.number is not None, "stopped by no signal"
            raise Interrupted(
                f"stopped by {stop.name} after step {self.step} of {total}; state saved in "
                f"{self.trainer.store.path(self.step)}\nGo on with the same command and --resume auto",
                stop.number,
            )
        if self.saved_at != self.step:
            self._save()
        self._plot()
        losses = [line["loss"] for line in self.log.lines if "loss" in line]
        return TrainResult(
            self.step,
            losses[-1] if losses else None,
            self.evaluation,
            self.num_target_tokens,
            self.num_tokens,
            time.perf_counter() - begin,
        )

    def close(self) -> None:
        """Closes what was opened, and drops the optimiser's state."""
        self.bar.close()
        self.log.close()
        if self.writer is not None:
            self.writer.close()
        self.batches.close()
        self.opt_state = None

    def _settle(self, until: int | None = None) -> None:
        """Fetches the metrics of pending steps, checks them, and logs what is due."""
        while self.pending and (until is None or self.pending[0][0] <= until):
            step, on_device = self.pending.popleft()
            metrics = jax.device_get(on_device)
            if not metrics["finite"]:
                self._numbers_went_wrong(step, metrics)
            self.interval.add(metrics)
            self.num_target_tokens += int(metrics["num_target_tokens"])
            self.num_tokens += int(metrics["num_tokens"])
            if step % self.config.logging_steps == 0 or step == self.trainer.total_steps:
                now = time.perf_counter()
                self.interval.seconds, self.since = now - self.since, now
                line = self.interval.line(
                    step=step,
                    epoch=step / self.trainer.steps_per_epoch,
                    grad_norm=float(metrics["grad_norm"]),
                    learning_rate=self.trainer.schedule(step - 1),
                )
                self.interval = Interval()
                self._write(line)
                loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
                self.bar.set_postfix_str(f"loss {loss}, {line['tokens_per_second']:.0f} tokens/s")

    def _evaluate_if_due(self, stop: StopSignals) -> None:
        rows, every, step = self.trainer.eval_rows, self.config.eval_steps, self.step
        due = step == self.trainer.total_steps or (every is not None and step > 0 and step % every == 0)
        if rows is None or not due or any(line["step"] == step and "eval_loss" in line for line in self.log.lines):
            return
        self._settle()
        begin = time.perf_counter()
        with eval_batches(rows, self.trainer.eval_batch_size) as batches:
            result = evaluate(
                self.eval_step, self.trainable, self.frozen, batches, mesh=self.mesh, stop=lambda: bool(stop)
            )
        if result is not None:
            self.evaluation = result
            self._write({"step": step, "eval_loss": result.loss, "num_target_tokens": result.num_target_tokens})
            tqdm.write(f"step {step}: eval_loss {result.loss:.4f}", file=sys.stderr)
        self.since += time.perf_counter() - begin

    def _save(self) -> None:
        if self.saved_at == self.step:
            return
        self._settle()
        begin = time.perf_counter()
        self.interval.seconds = begin - self.since if self.interval.num_steps else 0.0
        position = {"data": self.batches.get_state(), "interval": self.interval.to_dict()}
        state = TrainState(self.trainable, self.opt_state, self.rng, self.step, position)
        self.trainer.store.save(state, self.trainer.fingerprint)
        self.saved_at = self.step
        self.since += time.perf_counter() - begin

    def _write(self, line: dict[str, Any]) -> None:
        self.log.write(line)
        if self.writer is not None:
            self.writer.write(line)

    def _plot(self) -> None:
        try:
            plot_loss(self.log.lines, self.trainer.folder.loss_plot)
        except ImportError as error:
            print(f"no {self.trainer.folder.loss_plot.name}: {error}", file=sys.stderr)

    def _numbers_went_wrong(self, step: int, metrics: Any) -> None:
        targets = max(int(metrics["num_target_tokens"]), 1)
        steps = self.trainer.store.steps()
        last = f"the last good checkpoint is {self.trainer.store.path(steps[-1])}" if steps else "none was saved yet"
        raise NumericsError(
            f"step {step}: loss {metrics['loss_sum'] / targets}, gradient norm {metrics['grad_norm']}, learning rate "
            f"{self.trainer.schedule(step - 1):.3g}; they must be finite. Nothing of this step was saved; {last}\n"
            "Try a smaller learning_rate, or look for the row or weight that is not finite"
        )


def _weights_sample(model: CausalLM) -> int:
    """CRC-32 of a few of the base's weights: enough to tell two models of one shape apart."""
    samples = (model.norm.weight[...], model.embed_tokens.weight[:8], model.layers.self_attn.q_proj.weight[:, :1])
    crc = 0
    for sample in samples:
        crc = zlib.crc32(np.ascontiguousarray(np.asarray(jax.device_get(sample), np.float32)).tobytes(), crc)
    return crc
