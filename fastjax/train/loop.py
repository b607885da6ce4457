"""The training loop: batches in, checkpoints and metrics out, around the pure step."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from flax import nnx
from jax.sharding import Mesh

from fastjax.errors import DeviceMemoryError, Interrupted, NumericsError, UserError, is_out_of_memory
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, split_trainable
from fastjax.models.remat import AUTO, RematPlan, parse_plan
from fastjax.train.best import Best, best_of
from fastjax.train.config import TrainConfig
from fastjax.train.data import Batches, Dataset, TrainingRows, eval_batches, steps_per_epoch, train_batches
from fastjax.train.evaluate import EvalResult, evaluate
from fastjax.train.feed import Feed
from fastjax.train.health import Health
from fastjax.train.interrupts import StopSignals
from fastjax.train.memory import out_of_memory
from fastjax.train.mesh import batch_sharding, make_mesh, num_batch_shards, put_batch, replicated
from fastjax.train.metrics import Interval, MetricsFile, check_writer, make_writer, plot_loss, read_metrics
from fastjax.train.optim import make_optimizer
from fastjax.train.plan.abstract import abstract_batch
from fastjax.train.plan.auto import auto_step
from fastjax.train.progress import Progress
from fastjax.train.result import TrainResult
from fastjax.train.resume import fingerprint, horizon, horizon_note
from fastjax.train.run_folder import RunFolder
from fastjax.train.schedule import make_schedule, num_warmup_steps, total_optimizer_steps
from fastjax.train.state import CheckpointStore, TrainState, num_bytes, restore
from fastjax.train.step import TrainStep, make_eval_step, make_train_step


class Trainer:
    """One run over one model; `train` does it."""

    def __init__(
        self,
        model: CausalLM,
        config: TrainConfig,
        rows: TrainingRows,
        eval_rows: Dataset | None = None,
        *,
        lora: LoraConfig | None = None,
        mesh: Mesh | None = None,
        start: Callable[[CausalLM], None] | None = None,
        finish: Callable[[CausalLM, RunFolder], None] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Nothing is written yet.

        Args:
          model: with its adapters for method=lora. After `train`, also an interrupted one, it holds the trained
            weights; while it runs its trainable arrays are donated.
          lora: what the adapters were made from; a resumed run must have the same.
          mesh: None makes the one that `config.mesh` names.
          start: called with the model as the run starts or goes on, before anything is written.
          finish: called with the trained model once all steps are done, to save the result.
          say: takes each message meant for a person.
        Raises: UserError for settings that cannot be.
        """
        self.model, self.config, self.rows, self.eval_rows, self.finish = model, config, rows, eval_rows, finish
        self.start, self.say = start, say
        self.mesh = mesh or make_mesh(config.data_parallel_size)
        shards = num_batch_shards(self.mesh)
        self.batch_size = config.per_device_train_batch_size * shards
        self.eval_batch_size = config.per_device_eval_batch_size * shards
        self.steps_per_epoch = steps_per_epoch(len(rows), self.batch_size, config.gradient_accumulation_steps)
        self.total_steps = total_optimizer_steps(self.steps_per_epoch, config.num_train_epochs, config.max_steps)
        warmup_steps = num_warmup_steps(self.total_steps, config.warmup_steps, config.warmup_ratio)
        self.horizon = horizon(self.total_steps, warmup_steps)
        self.schedule = make_schedule(
            config.lr_scheduler_type,
            config.learning_rate,
            warmup_steps=warmup_steps,
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
        if config.remat != AUTO:
            parse_plan(config.remat)
        check_writer(config.report_to)
        self.folder = RunFolder(Path(config.output_dir))
        self.store = CheckpointStore(self.folder.checkpoints, config.save_total_limit)
        self.fingerprint = fingerprint(config, model, lora, rows, self.batch_size)

    def train(self) -> TrainResult:
        """Trains from the start, or from the checkpoint that `config.resume` names, to the last step.

        Raises: UserError for a folder or checkpoint that does not fit; NumericsError when a loss or gradient is NaN or
          infinite; Interrupted after SIGINT or SIGTERM, the state having been saved.
        """
        self.folder.check(self.config.resume, self.config.overwrite_output_dir)
        with self.folder.lock():
            return self._train()

    def _train(self) -> TrainResult:
        config = self.config
        # Again: another run may have written there before the lock was ours.
        self.folder.check(config.resume, config.overwrite_output_dir)
        checkpoint, complaints = self.folder.find_checkpoint(config.resume)
        if complaints and checkpoint is None:
            raise UserError(f"no whole checkpoint is left: {'; '.join(complaints)}; start anew without resume")
        for complaint in complaints:
            self.say(f"passed over a damaged checkpoint: {complaint}")
        graphdef, trainable, frozen = split_trainable(self.model, config.method)
        state = self._initial_state(trainable, checkpoint)
        frozen = jax.device_put(frozen, replicated(self.mesh))
        # Lets go of the initial values that a checkpoint has replaced.
        nnx.update(self.model, state.trainable, frozen)
        del trainable
        if checkpoint is not None:
            if self._is_finished(checkpoint, state.step):
                self.say(
                    f"already at step {state.step} of {self.total_steps}; "
                    "raise --max_steps or --num_train_epochs to go on"
                )
                lines = read_metrics(self.folder.metrics)
                return TrainResult(state.step, state.step, state.step / self.steps_per_epoch, lines)
            self.say(f"going on from {checkpoint} (step {state.step} of {self.total_steps})")
            note = horizon_note(config.lr_scheduler_type, state.step, state.position["horizon"], self.horizon)
            if note is not None:
                self.say(note)
        batches = train_batches(
            self.rows,
            batch_size=self.batch_size,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed,
        )
        if state.position:
            batches.set_state(state.position["data"])
        if self.start is not None:
            self.start(self.model)
        if not config.overwrite_output_dir:
            self.folder.check_room(num_bytes(state))
        # Everything that can be refused has been; from here on the folder changes.
        self.folder.start(config.to_dict(), keep=checkpoint is not None)
        if config.overwrite_output_dir:
            self.folder.check_room(num_bytes(state))
        self.store.discard_after(state.step)
        run = _Run(self, graphdef, frozen, state, batches)
        try:
            with StopSignals() as stop:
                result = run.steps(stop)
                if self.finish is not None:
                    nnx.update(self.model, run.trainable)
                    self.finish(self.model, self.folder)
                    self.folder.mark_result(self.store.path(result.step))
        except Exception as error:
            self._wait_for_checkpoint()
            if is_out_of_memory(error):
                raise DeviceMemoryError(out_of_memory(error, self.config)) from error
            raise
        except BaseException:
            self.store.abandon()
            raise
        finally:
            run.close()
            nnx.update(self.model, run.trainable)
        return result

    def _is_finished(self, checkpoint: Path, step: int) -> bool:
        """Whether an earlier call did all: the last step, its evaluation, and the result's files after it."""
        lines = [line for line in read_metrics(self.folder.metrics) if line["step"] <= step]
        if step < self.total_steps and not self.stops_early(self.best_of(lines)):
            return False
        if self.eval_rows is not None and not _is_evaluated(read_metrics(self.folder.metrics), step):
            return False
        # A result of fewer steps may lie there, if a run with more was killed before it wrote its own.
        return self.finish is None or self.folder.has_result(self.config.method, of=checkpoint)

    def _wait_for_checkpoint(self) -> None:
        """What was on its way when the run failed becomes whole; its own failure is told beside that one."""
        try:
            self.store.wait()
        except OSError as error:
            self.say(f"the checkpoint on its way when the run stopped was lost as well: {error}")

    def best_of(self, lines: list[dict[str, Any]]) -> Best:
        """The best evaluation among the lines of metrics.jsonl."""
        return best_of(lines, self.config.early_stopping_threshold)

    def stops_early(self, best: Best) -> bool:
        """Whether the run ends here, though steps are left."""
        patience = self.config.early_stopping_patience
        return patience is not None and best.num_worse >= patience

    def rows_until(self, step: int) -> int:
        """Rows that the first `step` steps see; the last window of an epoch may be short."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        window = self.batch_size * self.config.gradient_accumulation_steps
        return epochs * len(self.rows) + min(steps * window, len(self.rows))

    def _initial_state(self, trainable: Any, checkpoint: Path | None) -> TrainState:
        everywhere = replicated(self.mesh)
        trainable = jax.device_put(trainable, everywhere)
        rng = jax.device_put(jax.random.key(self.config.seed), everywhere)
        if checkpoint is None:
            opt_state = jax.jit(self.optimizer.init, out_shardings=everywhere)(trainable)
            return TrainState(trainable, opt_state, rng, 0, {})
        shapes = jax.eval_shape(self.optimizer.init, trainable)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)
        template = TrainState(trainable, shapes, rng, 0, {})
        state = restore(checkpoint, template, self.fingerprint, self.config.resume_override or ())
        if state.step > self.total_steps:
            raise UserError(
                f"{checkpoint} is at step {state.step}, and this run ends at {self.total_steps}; "
                "raise max_steps or num_train_epochs"
            )
        return state


class _Run:
    """The moving parts of one `train` call."""

    def __init__(self, trainer: Trainer, graphdef: Any, frozen: Any, state: TrainState, batches: Batches) -> None:
        self.trainer, self.config, self.mesh = trainer, trainer.config, trainer.mesh
        self.feed = Feed(batches, lambda batch: put_batch(batch, self.mesh))
        self.frozen, self.trainable, self.opt_state = frozen, state.trainable, state.opt_state
        self.rng, self.step, self.first_step = state.rng, state.step, state.step
        self.interval = Interval(**state.position.get("interval", {}))
        self.health = Health(self.config.nonfinite, state.position.get("health"))
        self.saved_at = state.step if state.position else None
        self.evaluation: EvalResult | None = None
        self.num_target_tokens = self.num_tokens = 0
        self.loss_sum = 0.0
        # Steps that the device may still be at: (step, their metrics there).
        self.pending: deque[tuple[int, Any]] = deque()
        self.train_step = self._make_step(graphdef, batches)
        self.eval_step = make_eval_step(graphdef, mesh=self.mesh)
        folder = trainer.folder
        self.writer = make_writer(self.config.report_to, folder.tensorboard, self.config.to_dict(), step=self.step)
        self.log = MetricsFile(folder.metrics, keep_until=self.step if state.position else None)
        self.progress = Progress(trainer.total_steps, self.step)
        self.best = Best()
        self._judge()

    def _make_step(self, graphdef: Any, batches: Batches) -> TrainStep:
        config, trainer = self.config, self.trainer

        def make(plan: RematPlan) -> TrainStep:
            skip = config.nonfinite == "skip"
            return make_train_step(graphdef, trainer.optimizer, mesh=self.mesh, remat=plan, skip_nonfinite=skip)

        if config.remat != AUTO:
            return make(parse_plan(config.remat))
        shape = (config.gradient_accumulation_steps, trainer.batch_size, max(batches.widths))
        batch = abstract_batch(*shape, packed=batches.packed)
        sharding = batch_sharding(self.mesh)
        return auto_step(
            make,
            (self.trainable, self.opt_state, self.frozen),
            {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()},
            self.rng,
            config=trainer.model.config,
            itemsize=trainer.model.dtype.itemsize,
            rank=0 if config.method == "full" else config.lora_r,
            num_shards=num_batch_shards(self.mesh),
            budget_gib=config.memory_budget_gib,
            say=trainer.say,
        )

    def steps(self, stop: StopSignals) -> TrainResult:
        """All steps that are left, with their logging, evaluating and saving."""
        begin = time.perf_counter()
        self.since = begin - self.interval.seconds
        every, total = self.config.logging_steps, self.trainer.total_steps
        # A run that was stopped between a step and its evaluation still owes it.
        self._evaluate_if_due(stop)
        while self._has_steps_left() and not stop:
            self.trainable, self.opt_state, metrics = self.train_step(
                self.trainable, self.opt_state, self.frozen, self.feed.take(), self.rng
            )
            self.step += 1
            if self.step < total:
                self.feed.prepare()
            self.progress.step()
            self.pending.append((self.step, metrics))
            # One step behind, so that the device never waits for the host to read and write numbers.
            if (self.step - 1) % every == 0:
                self._settle(until=self.step - 1)
            # A checkpoint that failed while the steps went on ends the run here.
            self.trainer.store.check()
            self._evaluate_if_due(stop)
            if self.step % self.config.save_steps == 0 or self.step == total:
                self._save()
        self._settle()
        if stop and (self._has_steps_left() or self._owes_evaluation()):
            self._save()
            self.trainer.store.wait()
            assert stop.number is not None, "stopped by no signal"
            raise Interrupted(
                f"stopped by {stop.name} after step {self.step} of {total}; state saved in "
                f"{self.trainer.store.path(self.step)}\nGo on with the same command and --resume auto",
                stop.number,
            )
        self._save()
        if (summary := self.health.summary()) is not None:
            self.trainer.say(summary)
        self.trainer.store.wait()
        if self.step < total:
            self.trainer.say(
                f"stopped early after step {self.step} of {total}: {self.best.num_worse} evaluations in a row brought "
                f"no lower eval_loss than {self.best.eval_loss:.4f}, that of step {self.best.step}"
            )
        self._load_best()
        self._plot()
        rows_until = self.trainer.rows_until
        return TrainResult(
            step=self.step,
            first_step=self.first_step,
            epoch=self.step / self.trainer.steps_per_epoch,
            log_history=list(self.log.lines),
            training_loss=self.loss_sum / self.num_target_tokens if self.num_target_tokens else None,
            evaluation=self.evaluation,
            best=self.best if self.best.step is not None else None,
            num_rows=rows_until(self.step) - rows_until(self.first_step),
            num_target_tokens=self.num_target_tokens,
            num_tokens=self.num_tokens,
            seconds=time.perf_counter() - begin,
        )

    def close(self) -> None:
        """Closes what was opened, and drops the optimiser's state."""
        self.progress.close()
        self.log.close()
        if self.writer is not None:
            self.writer.close()
        self.feed.close()
        self.opt_state = None

    def _settle(self, until: int | None = None) -> None:
        """Fetches the metrics of pending steps, checks them, and logs what is due."""
        while self.pending and (until is None or self.pending[0][0] <= until):
            step, on_device = self.pending.popleft()
            metrics = jax.device_get(on_device)
            finding = self.health.look(metrics)
            if finding is not None and finding.fatal:
                self._numbers_went_wrong(step, finding.text)
            if finding is not None:
                self.progress.note(f"step {step}: {finding.text}")
            self.interval.add(metrics)
            if metrics["finite"]:
                self.loss_sum += float(metrics["loss_sum"])
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
                self.progress.logged(line)

    def _evaluate_if_due(self, stop: StopSignals) -> None:
        if not self._owes_evaluation():
            return
        self._settle()
        rows, step = self.trainer.eval_rows, self.step
        assert rows is not None
        begin = time.perf_counter()
        with eval_batches(rows, self.trainer.eval_batch_size) as batches:
            result = evaluate(
                self.eval_step, self.trainable, self.frozen, batches, mesh=self.mesh, stop=lambda: bool(stop)
            )
        if result is not None:
            if not math.isfinite(result.loss):
                self._numbers_went_wrong(step, f"eval_loss {result.loss}")
            self.evaluation = result
            line = {"step": step, "eval_loss": result.loss, "num_target_tokens": result.num_target_tokens}
            self._write(line)
            self.progress.evaluated(line)
            self._judge()
        self.since += time.perf_counter() - begin
        if result is not None and self.config.load_best_model_at_end and self.best.step == step:
            self._save()

    def _has_steps_left(self) -> bool:
        return self.step < self.trainer.total_steps and not self.trainer.stops_early(self.best)

    def _judge(self) -> None:
        """Looks for the best evaluation so far, whose checkpoint stays if it is wanted at the end."""
        self.best = self.trainer.best_of(self.log.lines)
        if self.config.load_best_model_at_end:
            self.trainer.store.best = self.best.step

    def _load_best(self) -> None:
        """Puts the weights of the best evaluation in the place of the last ones, if that is wanted."""
        trainer, step = self.trainer, self.best.step
        if not self.config.load_best_model_at_end or step is None or step == self.step:
            return
        here = TrainState(self.trainable, self.opt_state, self.rng, self.step, {})
        override = self.config.resume_override or ()
        self.trainable = restore(trainer.store.path(step), here, trainer.fingerprint, override).trainable
        trainer.say(f"the weights are those of step {step}, whose eval_loss {self.best.eval_loss:.4f} is the lowest")

    def _owes_evaluation(self) -> bool:
        every, step = self.config.eval_steps, self.step
        due = step == self.trainer.total_steps or (every is not None and step > 0 and step % every == 0)
        return self.trainer.eval_rows is not None and due and not _is_evaluated(self.log.lines, step)

    def _save(self) -> None:
        if self.saved_at == self.step:
            return
        self._settle()
        begin = time.perf_counter()
        self.interval.seconds = begin - self.since if self.interval.num_steps else 0.0
        position = {
            "data": self.feed.get_state(),
            "interval": self.interval.to_dict(),
            "horizon": self.trainer.horizon,
            "health": self.health.to_dict(),
        }
        state = TrainState(self.trainable, self.opt_state, self.rng, self.step, position)
        self.log.flush()
        self.trainer.store.begin(state, self.trainer.fingerprint)
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

    def _numbers_went_wrong(self, step: int, what: str) -> NoReturn:
        self.trainer._wait_for_checkpoint()
        path, _ = self.trainer.store.newest()
        last = f"the last good checkpoint is {path}" if path else "none was saved yet"
        raise NumericsError(
            f"step {step}: {what}, learning rate {self.trainer.schedule(step - 1):.3g}; they and the updated weights "
            f"must be finite. Nothing of this step was saved; {last}\n"
            "Try a smaller learning_rate, or look for the row or weight that is not finite"
        )


def _is_evaluated(lines: list[dict[str, Any]], step: int) -> bool:
    return any(line["step"] == step and "eval_loss" in line for line in lines)
