"""The training step and the evaluation step: pure functions, jitted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fastjax.models.parallel import ALONE, Parallel
from fastjax.models.remat import RematPlan
from fastjax.models.sharding import AXES, BATCH_AXES, Layout
from fastjax.train.compressed import CompressedState, Residual, compressed_gradients
from fastjax.train.loss import ROWS, head_is_trained, loss_sum
from fastjax.train.mesh import replicated, state_specs
from fastjax.train.optim import step_count

Metrics = dict[str, jax.Array]
TrainStep = Callable[..., tuple[Any, Any, Metrics]]
EvalStep = Callable[..., Metrics]


def make_train_step(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh,
    remat: str | RematPlan = "none",
    skip_nonfinite: bool = False,
    gradient_bits: int | None = None,
) -> TrainStep:
    """The jitted function (trainable, opt_state, frozen, batch, rng) -> (trainable, opt_state, metrics).

    With micro-batches a, target sets T_a and losses l: g = sum_a grad sum_{T_a} l / sum_a |T_a|. The division happens
    once, by the targets of the whole optimiser step, so a row weighs the same wherever the batch is cut.

    `trainable` and `opt_state` are donated. `nnx.merge(graphdef, trainable, frozen)` is the model. `batch` holds
    [A, B, T] arrays (see `loss.shifted_targets`); A micro-batches run one after the other. `rng` is the run's key: the
    key of a micro-batch follows from it, the optimiser step and the micro-batch's number.

    Metrics stay on the device: loss_sum float32, num_target_tokens and num_tokens int32, grad_norm float32 (before
    clipping, of the trainable leaves), finite bool (false if the loss, a gradient or an updated leaf is NaN or
    infinite).

    Args:
      skip_nonfinite: where `finite` is false the weights and moments stay as they were. The step still counts, so that
        the next one has its own learning rate and dropout bits.
      gradient_bits: 8 or 4: gradients are summed over the rows' devices in so many bits, and `opt_state` is a
        `CompressedState`. None sums them as they are.
    """

    def step(
        trainable: Any, opt_state: Any, frozen: Any, batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[Any, Any, Metrics]:
        rng = jax.random.fold_in(rng, step_count(opt_state))
        run = _Sharded.of(graphdef, trainable, frozen, mesh)
        residuals = {} if gradient_bits is None else opt_state.residuals
        gradients, residuals, metrics = run.map(
            partial(_summed_gradients, graphdef, remat, run.parallel, gradient_bits),
            (trainable, frozen, batch, (rng, residuals)),
            (run.trained, PartitionSpec(AXES), PartitionSpec()),
            last=(PartitionSpec(), PartitionSpec(AXES)),
        )
        count = jnp.maximum(metrics["num_target_tokens"], 1)
        gradients = jax.tree.map(lambda g: g / count, gradients)
        grad_norm = optax.tree.norm(gradients)
        opt_state_before = opt_state
        inner = opt_state if gradient_bits is None else opt_state.optimizer
        updates, inner = optimizer.update(gradients, inner, trainable)
        opt_state = inner if gradient_bits is None else CompressedState(inner, residuals)
        updated = optax.apply_updates(trainable, updates)
        finite = jnp.isfinite(metrics["loss_sum"]) & jnp.isfinite(grad_norm)
        for leaf in jax.tree.leaves(updated):
            finite &= jnp.all(jnp.isfinite(leaf))
        if skip_nonfinite:
            updated = jax.tree.map(partial(jnp.where, finite), updated, trainable)
            opt_state = jax.tree.map(partial(_unless_skipped, finite), opt_state, opt_state_before)
        updated, opt_state, metrics = run.placed(
            updated, opt_state, {**metrics, "grad_norm": grad_norm, "finite": finite}
        )
        return updated, opt_state, metrics

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=replicated(mesh) if mesh.size == 1 else None)


def _summed_gradients(
    graphdef: Any,
    remat: str | RematPlan,
    parallel: Parallel,
    gradient_bits: int | None,
    trainable: Any,
    frozen: Any,
    batch: dict[str, jax.Array],
    rng_and_residuals: tuple[jax.Array, dict[str, Residual]],
) -> tuple[Any, dict[str, Residual], Metrics]:
    """(float32 gradients, residuals, sums) over all micro-batches and devices.

    On a mesh, each device's part of the first two.
    """
    rng, residuals = rng_and_residuals

    def micro_loss(
        trainable: Any, frozen: Any, batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        model = nnx.merge(graphdef, trainable, frozen)
        train_head = head_is_trained(model, trainable)
        total, targets = loss_sum(model, batch, parallel=parallel, train_head=train_head, dropout_rng=rng, remat=remat)
        return total, {"loss_sum": total, "num_target_tokens": targets, "num_tokens": count_tokens(batch)}

    gradient = jax.grad(micro_loss, has_aux=True)
    num_micro = batch["input_ids"].shape[0]

    def micro(index: jax.Array | int, one: dict[str, jax.Array]) -> tuple[Any, Metrics]:
        one = _on_device(one)
        gradients, sums = gradient(trainable, frozen, one, jax.random.fold_in(rng, index))
        return jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums

    if num_micro == 1:
        totals = micro(0, jax.tree.map(lambda x: x[0], batch))
    else:
        like = jax.eval_shape(micro, 0, jax.tree.map(lambda x: x[0], batch))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        totals, _ = jax.lax.scan(
            lambda sums, inputs: (jax.tree.map(jnp.add, sums, micro(*inputs)), None),
            zeros,
            (jnp.arange(num_micro), batch),
        )
    gradients, sums = totals
    # Once for all micro-batches.
    sums = parallel.summed_over_rows(sums)
    if gradient_bits is None:
        return parallel.summed_gradients(gradients), {}, sums
    return *compressed_gradients(parallel, gradients, residuals, gradient_bits), sums


@dataclass(frozen=True)
class _Sharded:
    """A model's arrays on a mesh of several devices, and functions that run on each device's parts.

    Attributes:
      trained, frozen: how the two trees of weights are split, as trees of PartitionSpec.
    """

    mesh: Mesh
    parallel: Parallel
    trained: Any
    frozen: Any
    layout: Layout

    @classmethod
    def of(cls, graphdef: Any, trainable: Any, frozen: Any, mesh: Mesh) -> "_Sharded":
        layout = Layout.of(nnx.merge(graphdef, trainable, frozen).config, mesh)
        trained, kept = layout.specs(trainable, trained=True), layout.specs(frozen, trained=False)
        parallel = ALONE if mesh.size == 1 else Parallel.of(layout, trainable, frozen)
        return cls(mesh, parallel, trained, kept, layout)

    def map(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, Any, dict[str, jax.Array], Any],
        out: Any,
        last: Any = None,
    ) -> Any:
        """function(trainable, frozen, batch, the rest) on every device's parts.

        Args:
          arguments: the batch's arrays have their rows in dimension 1.
          out: how what it returns is put together.
          last: how the last argument is split; None: it is whole everywhere.
        """
        if self.mesh.size == 1:
            return function(*arguments)
        rows = jax.tree.map(lambda _: PartitionSpec(None, BATCH_AXES), arguments[2])
        specs = (self.trained, self.frozen, rows, PartitionSpec() if last is None else last)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(*arguments)

    def placed(self, trainable: Any, opt_state: Any, metrics: Metrics) -> tuple[Any, Any, Metrics]:
        """The results of a step, where its arguments lay."""
        if self.mesh.size == 1:
            return trainable, opt_state, metrics
        place = lambda tree, specs: jax.tree.map(  # noqa: E731
            lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)), tree, specs
        )
        states = state_specs(self.layout, opt_state, trainable)
        whole = jax.tree.map(lambda _: PartitionSpec(), metrics)
        return place(trainable, self.trained), place(opt_state, states), place(metrics, whole)


def _on_device(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A batch whose rows of the embedding, if it brings them, have left host memory."""
    return batch | {name: jax.device_put(batch[name], jax.memory.Space.Device) for name in (ROWS,) if name in batch}


def _unless_skipped(finite: jax.Array, after: jax.Array, before: jax.Array) -> jax.Array:
    is_count = after.ndim == 0 and jnp.issubdtype(after.dtype, jnp.integer)
    return after if is_count else jnp.where(finite, after, before)


def make_eval_step(graphdef: Any, *, mesh: Mesh) -> EvalStep:
    """The jitted function (trainable, frozen, batch) -> metrics: the training loss without dropout.

    `batch` holds [1, B, T] arrays. Metrics: loss_sum float32, num_target_tokens and num_tokens int32.
    """

    def sums(parallel: Parallel, trainable: Any, frozen: Any, batch: dict[str, jax.Array], rng: None) -> Metrics:
        model = nnx.merge(graphdef, trainable, frozen)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), _on_device(batch))
        # Without a backward nothing is kept or computed again, but long rows go through the MLPs in pieces.
        total, targets = loss_sum(model, batch, parallel=parallel, remat="full")
        return parallel.summed_over_rows(
            {"loss_sum": total, "num_target_tokens": targets, "num_tokens": count_tokens(batch)}
        )

    def step(trainable: Any, frozen: Any, batch: dict[str, jax.Array]) -> Metrics:
        run = _Sharded.of(graphdef, trainable, frozen, mesh)
        return run.map(partial(sums, run.parallel), (trainable, frozen, batch, None), PartitionSpec())

    return jax.jit(step, out_shardings=replicated(mesh))


def count_tokens(batch: dict[str, jax.Array]) -> jax.Array:
    """int32 scalar: the tokens of a batch, padding excluded."""
    return jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32)
