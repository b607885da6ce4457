"""The steps of a run: batches in, checkpoints and metrics out, around the pure step."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import jax
from jax.sharding import Mesh

from fastjax.errors import Interrupted, NumericsError
from fastjax.hosts.exchange import is_first
from fastjax.models.decoder import CausalLM
from fastjax.models.remat import AUTO, RematPlan, parse_plan
from fastjax.train.agreed_stop import AgreedStop
from fastjax.train.best import Best
from fastjax.train.compressed import BITS
from fastjax.train.config import TrainConfig
from fastjax.train.data import Batches, Dataset, eval_batches
from fastjax.train.evaluate import EvalResult, evaluate
from fastjax.train.feed import Feed
from fastjax.train.health import Health
from fastjax.train.host_embedding import HostTable
from fastjax.train.memory import Need, savings
from fastjax.train.mesh import batch_shardings, local_rows, num_batch_shards, put_batch, shares_threads
from fastjax.train.metrics import Interval, MetricsFile, make_writer, plot_loss
from fastjax.train.plan.abstract import abstract_batch
from fastjax.train.plan.auto import auto_step
from fastjax.train.plan.choose import Choice
from fastjax.train.progress import Progress
from fastjax.train.result import TrainResult
from fastjax.train.run_folder import RunFolder
from fastjax.train.state import CheckpointStore, TrainState, restore
from fastjax.train.step import TrainStep, make_eval_step, make_train_step


class Setup(Protocol):
    """What stays the same through all steps of a run: `fastjax.train.loop.Trainer` has it."""

    config: TrainConfig
    mesh: Mesh
    model: CausalLM
    eval_rows: Dataset | None
    batch_size: int
    eval_batch_size: int
    steps_per_epoch: int
    total_steps: int
    horizon: dict[str, int]
    schedule: Callable
    optimizer: Any
    folder: RunFolder
    store: CheckpointStore
    fingerprint: dict[str, Any]
    say: Callable[[str], None]
    need: Need | None
    choice: Choice | None

    def best_of(self, lines: list[dict[str, Any]]) -> Best:
        """The best evaluation among logged lines."""

    def stops_early(self, best: Best) -> bool:
        """Whether enough evaluations in a row brought nothing better."""

    def rows_until(self, step: int) -> int:
        """Rows that the steps up to this one have seen."""

    def wait_for_checkpoint(self) -> None:
        """Until a checkpoint that is being written is whole, or has failed."""


class Run:
    """The moving parts of one training call; `steps` runs it, `close` ends it."""

    def __init__(
        self, setup: Setup, graphdef: Any, frozen: Any, state: TrainState, batches: Batches,
        table: HostTable | None = None,
    ) -> None:  # fmt: skip
        self.setup, self.config, self.mesh = setup, setup.config, setup.mesh
        self.look_up = dict if table is None else table.with_rows
        self.feed = Feed(batches, lambda batch: put_batch(self.look_up(batch), self.mesh))
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
        folder = setup.folder
        first = is_first()
        report_to = self.config.report_to if first else "none"
        self.writer = make_writer(report_to, folder.tensorboard, self.config.to_dict(), step=self.step)
        self.log = MetricsFile(folder.metrics, keep_until=self.step if state.position else None, write=first)
        self.progress = Progress(setup.total_steps, self.step, silent=not first)
        self.best = Best()
        self._judge()

    def _make_step(self, graphdef: Any, batches: Batches) -> TrainStep:
        config, setup = self.config, self.setup

        def make(plan: RematPlan) -> TrainStep:
            skip = config.nonfinite == "skip"
            return make_train_step(
                graphdef,
                setup.optimizer,
                mesh=self.mesh,
                remat=plan,
                skip_nonfinite=skip,
                gradient_bits=BITS.get(config.grad_compression),
            )

        if config.remat != AUTO:
            return make(parse_plan(config.remat))
        shape = (config.gradient_accumulation_steps, setup.batch_size, max(batches.widths))
        rows = (setup.model.config.hidden_size, setup.model.dtype) if config.offload_embedding else None
        batch = abstract_batch(*shape, packed=batches.packed, rows=rows)
        places = batch_shardings(batch, self.mesh)
        step = auto_step(
            make,
            (self.trainable, self.opt_state, self.frozen),
            {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in batch.items()},
            self.rng,
            config=setup.model.config,
            itemsize=setup.model.dtype.itemsize,
            num_shards=num_batch_shards(self.mesh),
            budget_gib=config.memory_budget_gib,
            say=setup.say,
            ways=savings(config, setup.need),
        )
        setup.choice = step.choice
        return step

    def steps(self, stop: AgreedStop) -> TrainResult:
        """All steps that are left, with their logging, evaluating and saving."""
        begin = time.perf_counter()
        self.since = begin - self.interval.seconds
        every, total = self.config.logging_steps, self.setup.total_steps
        one_at_a_time = shares_threads(self.mesh)
        # A run that was stopped between a step and its evaluation still owes it.
        self._evaluate_if_due(stop)
        while self._has_steps_left() and not stop.requested():
            self.trainable, self.opt_state, metrics = self.train_step(
                self.trainable, self.opt_state, self.frozen, self.feed.take(), self.rng
            )
            if one_at_a_time:
                jax.block_until_ready(metrics)
            self.step += 1
            if self.step < total:
                self.feed.prepare()
            self.progress.step()
            self.pending.append((self.step, metrics))
            # One step behind, so that the device never waits for the host to read and write numbers.
            if (self.step - 1) % every == 0:
                self._settle(until=self.step - 1)
            # A checkpoint that failed while the steps went on ends the run here.
            self.setup.store.check()
            self._evaluate_if_due(stop)
            if self.step % self.config.save_steps == 0 or self.step == total:
                self._save()
        self._settle()
        if stop and (self._has_steps_left() or self._owes_evaluation()):
            self._save()
            self.setup.store.wait()
            assert stop.number is not None, "stopped by no signal"
            raise Interrupted(
                f"stopped by {stop.name} after step {self.step} of {total}; state saved in "
                f"{self.setup.store.path(self.step)}\nGo on with the same command and --resume auto",
                stop.number,
            )
        self._save()
        if (summary := self.health.summary()) is not None:
            self.setup.say(summary)
        self.setup.store.wait()
        if self.step < total:
            self.setup.say(
                f"stopped early after step {self.step} of {total}: {self.best.num_worse} evaluations in a row brought "
                f"no lower eval_loss than {self.best.eval_loss:.4f}, that of step {self.best.step}"
            )
        self._load_best()
        self._plot()
        rows_until = self.setup.rows_until
        return TrainResult(
            step=self.step,
            first_step=self.first_step,
            epoch=self.step / self.setup.steps_per_epoch,
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
            if step % self.config.logging_steps == 0 or step == self.setup.total_steps:
                now = time.perf_counter()
                self.interval.seconds, self.since = now - self.since, now
                line = self.interval.line(
                    step=step,
                    epoch=step / self.setup.steps_per_epoch,
                    grad_norm=float(metrics["grad_norm"]),
                    learning_rate=self.setup.schedule(step - 1),
                )
                self.interval = Interval()
                self._write(line)
                self.progress.logged(line)

    def _evaluate_if_due(self, stop: AgreedStop) -> None:
        if not self._owes_evaluation():
            return
        self._settle()
        rows, step = self.setup.eval_rows, self.step
        assert rows is not None
        begin = time.perf_counter()
        here = local_rows(self.mesh, self.setup.eval_batch_size)
        with eval_batches(rows, self.setup.eval_batch_size, local_rows=here) as batches:
            result = evaluate(
                self.eval_step, self.trainable, self.frozen, batches, mesh=self.mesh, stop=stop.requested,
                look_up=self.look_up,
            )  # fmt: skip
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
        return self.step < self.setup.total_steps and not self.setup.stops_early(self.best)

    def _judge(self) -> None:
        """Looks for the best evaluation so far, whose checkpoint stays if it is wanted at the end."""
        self.best = self.setup.best_of(self.log.lines)
        if self.config.load_best_model_at_end:
            self.setup.store.best = self.best.step

    def _load_best(self) -> None:
        """Puts the weights of the best evaluation in the place of the last ones, if that is wanted."""
        setup, step = self.setup, self.best.step
        if not self.config.load_best_model_at_end or step is None or step == self.step:
            return
        here = TrainState(self.trainable, self.opt_state, self.rng, self.step, {})
        override = self.config.resume_override or ()
        self.trainable = restore(setup.store.path(step), here, setup.fingerprint, override).trainable
        setup.say(f"the weights are those of step {step}, whose eval_loss {self.best.eval_loss:.4f} is the lowest")

    def _owes_evaluation(self) -> bool:
        every, step = self.config.eval_steps, self.step
        due = step == self.setup.total_steps or (every is not None and step > 0 and step % every == 0)
        return self.setup.eval_rows is not None and due and not is_evaluated(self.log.lines, step)

    def _save(self) -> None:
        if self.saved_at == self.step:
            return
        self._settle()
        begin = time.perf_counter()
        self.interval.seconds = begin - self.since if self.interval.num_steps else 0.0
        position = {
            "data": self.feed.get_state(),
            "interval": self.interval.to_dict(),
            "horizon": self.setup.horizon,
            "health": self.health.to_dict(),
        }
        state = TrainState(self.trainable, self.opt_state, self.rng, self.step, position)
        self.log.flush()
        self.setup.store.begin(state, self.setup.fingerprint)
        self.saved_at = self.step
        self.since += time.perf_counter() - begin

    def _write(self, line: dict[str, Any]) -> None:
        self.log.write(line)
        if self.writer is not None:
            self.writer.write(line)

    def _plot(self) -> None:
        if not is_first():
            return
        try:
            plot_loss(self.log.lines, self.setup.folder.loss_plot)
        except ImportError as error:
            print(f"no {self.setup.folder.loss_plot.name}: {error}", file=sys.stderr)

    def _numbers_went_wrong(self, step: int, what: str) -> NoReturn:
        self.setup.wait_for_checkpoint()
        path, _ = self.setup.store.newest()
        last = f"the last good checkpoint is {path}" if path else "none was saved yet"
        raise NumericsError(
            f"step {step}: {what}, learning rate {self.setup.schedule(step - 1):.3g}; they and the updated weights "
            f"must be finite. Nothing of this step was saved; {last}\n"
            "Try a smaller learning_rate, or look for the row or weight that is not finite"
        )


def is_evaluated(lines: list[dict[str, Any]], step: int) -> bool:
    """Whether the evaluation after a step is logged."""
    return any(line["step"] == step and "eval_loss" in line for line in lines)
