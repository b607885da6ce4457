"""One run over one model: what its settings amount to, where it starts, and how it ends."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from fastjax.errors import DeviceMemoryError, Interrupted, NumericsError, UserError, is_out_of_memory
from fastjax.hosts.exchange import check_same, from_first, is_first, num_processes
from fastjax.hosts.watch import lost
from fastjax.models.decoder import CausalLM
from fastjax.models.host import place
from fastjax.models.lora import LoraConfig, split_trainable
from fastjax.models.parallel import Parallel
from fastjax.models.quantized import is_quantized
from fastjax.models.remat import AUTO, parse_plan
from fastjax.models.sharding import Layout
from fastjax.train.agreed_stop import AgreedStop
from fastjax.train.best import Best, best_of
from fastjax.train.compressed import CompressedState, no_residuals
from fastjax.train.config import TrainConfig
from fastjax.train.data import Batches, Dataset, TrainingRows, steps_per_epoch, train_batches
from fastjax.train.host_embedding import HostTable, check_offload, offloaded
from fastjax.train.memory import Need, out_of_memory
from fastjax.train.mesh import (
    check_compresses,
    check_covers_processes,
    config_mesh,
    frozen_shardings,
    local_rows,
    num_batch_shards,
    replicated,
    state_shardings,
    trained_shardings,
)
from fastjax.train.metrics import check_writer, read_metrics
from fastjax.train.optim import make_optimizer
from fastjax.train.plan.choose import Choice
from fastjax.train.result import TrainResult
from fastjax.train.resume import fingerprint, horizon, horizon_note
from fastjax.train.run_folder import RunFolder
from fastjax.train.schedule import make_schedule, num_warmup_steps, total_optimizer_steps
from fastjax.train.state import CheckpointStore, TrainState, num_bytes, restore
from fastjax.train.steps import Run, is_evaluated


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
        self.start, self.say = start, say if is_first() else _say_nothing
        self.mesh = mesh or config_mesh(config, model.config, config.method, quantized=is_quantized(model))
        check_covers_processes(self.mesh)
        check_compresses(config.grad_compression, self.mesh)
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
        check_offload(config, model.config)
        check_writer(config.report_to)
        self.folder = RunFolder(Path(config.output_dir))
        self.store = CheckpointStore(self.folder.checkpoints, config.save_total_limit)
        # What an error about memory tells of: set as soon as it is known.
        self.need: Need | None = None
        self.choice: Choice | None = None
        self.fingerprint = fingerprint(config, model, lora, rows, self.batch_size, dict(self.mesh.shape))
        check_same("what a run is made of", self.fingerprint)

    def train(self) -> TrainResult:
        """Trains from the start, or from the checkpoint that `config.resume` names, to the last step.

        Raises: UserError for a folder or checkpoint that does not fit; DeviceMemoryError, with what would take less,
          where the device's memory is too small; NumericsError when a loss or gradient is NaN or
          infinite; Interrupted after SIGINT or SIGTERM, the state having been saved.
        """
        with contextlib.ExitStack() as stack:

            def take_folder() -> None:
                self.folder.check(self.config.resume, self.config.overwrite_output_dir)
                stack.enter_context(self.folder.lock())

            from_first(take_folder)
            self.folder.check_shared()
            try:
                return self._train()
            except Exception as error:
                if is_out_of_memory(error):
                    raise DeviceMemoryError(out_of_memory(error, self.config, self.need, self.choice)) from error
                raise

    def _train(self) -> TrainResult:
        config = self.config
        # Again: another run may have written there before the lock was ours.
        from_first(lambda: self.folder.check(config.resume, config.overwrite_output_dir))
        checkpoint, complaints = self._find_checkpoint()
        if complaints and checkpoint is None:
            raise UserError(f"no whole checkpoint is left: {'; '.join(complaints)}; start anew without resume")
        for complaint in complaints:
            self.say(f"passed over a damaged checkpoint: {complaint}")
        graphdef, trainable, frozen = split_trainable(self.model, config.method)
        self.need = Need.of(
            config, self.model.config, trainable, self.optimizer, self.model.dtype.itemsize, self.mesh.size
        )
        state = self._initial_state(trainable, checkpoint)
        frozen = place(frozen, frozen_shardings(self.model.config, self.mesh, frozen))
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
            local_rows=local_rows(self.mesh, self.batch_size),
        )
        if state.position:
            batches.set_state(state.position["data"])
        if self.start is not None:
            self.start(self.model)
        from_first(lambda: self._start_folder(state, keep=checkpoint is not None))
        with offloaded(self.model, frozen, config.offload_embedding) as (frozen, table):
            return self._run(graphdef, frozen, state, batches, table)

    def _run(
        self, graphdef: Any, frozen: Any, state: TrainState, batches: Batches, table: HostTable | None
    ) -> TrainResult:
        run = Run(self, graphdef, frozen, state, batches, table)
        try:
            with AgreedStop() as stop:
                result = run.steps(stop)
                if self.finish is not None:
                    nnx.update(self.model, run.trainable)
                    if table is not None:
                        table.put_back()
                    self.finish(self.model, self.folder)
                    if is_first():
                        self.folder.mark_result(self.store.path(result.step))
        except Exception as error:
            if num_processes() > 1 and not isinstance(error, NumericsError | Interrupted):
                # The others may never write their part of the checkpoint that is on its way.
                self.store.abandon()
                raise (lost(error) or error) from error
            self.wait_for_checkpoint()
            raise
        except BaseException:
            self.store.abandon()
            raise
        finally:
            run.close()
            nnx.update(self.model, run.trainable)
        return result

    def _find_checkpoint(self) -> tuple[Path | None, list[str]]:
        def find() -> tuple[str | None, list[str]]:
            path, complaints = self.folder.find_checkpoint(self.config.resume)
            return None if path is None else str(path), complaints

        path, complaints = from_first(find)
        return None if path is None else Path(path), complaints

    def _start_folder(self, state: TrainState, *, keep: bool) -> None:
        """Everything that can be refused has been; from here on the folder changes."""
        if not self.config.overwrite_output_dir:
            self.folder.check_room(num_bytes(state))
        self.folder.start(self.config.to_dict(), keep=keep)
        if self.config.overwrite_output_dir:
            self.folder.check_room(num_bytes(state))
        self.store.discard_after(state.step)

    def _is_finished(self, checkpoint: Path, step: int) -> bool:
        """Whether an earlier call did all: the last step, its evaluation, and the result's files after it."""
        lines = [line for line in read_metrics(self.folder.metrics) if line["step"] <= step]
        if step < self.total_steps and not self.stops_early(self.best_of(lines)):
            return False
        if self.eval_rows is not None and not is_evaluated(read_metrics(self.folder.metrics), step):
            return False
        # A result of fewer steps may lie there, if a run with more was killed before it wrote its own.
        return self.finish is None or self.folder.has_result(self.config.method, of=checkpoint)

    def wait_for_checkpoint(self) -> None:
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
        config, mesh = self.model.config, self.mesh
        trainable = place(trainable, trained_shardings(config, mesh, trainable))
        rng = jax.jit(lambda: jax.random.key(self.config.seed), out_shardings=replicated(mesh))()

        def init(trainable: Any) -> Any:
            states = self.optimizer.init(trainable)
            if self.config.grad_compression == "none":
                return states
            layout = Layout.of(config, mesh)
            return CompressedState(states, no_residuals(Parallel.of(layout, trainable, {}), mesh, trainable))

        shapes = jax.eval_shape(init, trainable)
        places = state_shardings(config, mesh, shapes, trainable)
        if checkpoint is None:
            opt_state = jax.jit(init, out_shardings=places)(trainable)
            return TrainState(trainable, opt_state, rng, 0, {})
        shapes = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
        )
        template = TrainState(trainable, shapes, rng, 0, {})
        state = restore(checkpoint, template, self.fingerprint, self.config.resume_override or ())
        if state.step > self.total_steps:
            raise UserError(
                f"{checkpoint} is at step {state.step}, and this run ends at {self.total_steps}; "
                "raise max_steps or num_train_epochs"
            )
        return state


def _say_nothing(text: str) -> None:
    """What a process says that is not the first: the first one has said the same."""
