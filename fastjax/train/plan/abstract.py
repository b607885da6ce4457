"""A training step with nothing in memory: the abstract model, its states and its batch, ready to be compiled."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fastjax.models.checkpoint.names import places
from fastjax.models.checkpoint.packed import lay_out_packed, planned_formats
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, apply_lora, module_at, split_trainable
from fastjax.models.quant_config import QuantConfig
from fastjax.models.quantized import full_shape, quantized_linears
from fastjax.models.remat import RematPlan
from fastjax.train.host_embedding import take_table
from fastjax.train.loss import ROWS
from fastjax.train.mesh import batch_shardings, frozen_shardings, replicated, state_shardings, trained_shardings
from fastjax.train.optim import make_optimizer
from fastjax.train.plan.memory import num_bytes
from fastjax.train.step import make_train_step


def abstract_model(config: ModelConfig, dtype: Any, quantization: QuantConfig | None = None) -> CausalLM:
    """A model of jax.ShapeDtypeStruct leaves, its linear layers 4-bit if `quantization` is given."""
    model = CausalLM.abstract(config, dtype=dtype, param_dtype=dtype)
    if quantization is not None:
        flat = nnx.to_flat_state(nnx.state(model))
        expected = places({".".join(map(str, path)): full_shape(v.get_value()) for path, v in flat})
        lay_out_packed(model, planned_formats(quantization, expected, jnp.dtype(dtype).name), expected)
    return model


@dataclass(frozen=True)
class AbstractRun:
    """What `make_train_step`'s function takes, without a byte of it.

    Attributes:
      graphdef, trainable, frozen, opt_state: see `fastjax.train.step`.
      optimizer: of the run.
    """

    graphdef: Any
    trainable: Any
    frozen: Any
    opt_state: Any
    optimizer: Any

    @classmethod
    def make(
        cls, config: ModelConfig, *, method: str, dtype: Any, lora: LoraConfig | None, quantization: QuantConfig | None,
        optim: str = "adamw", offload_embedding: bool = False,
    ) -> "AbstractRun":  # fmt: skip
        """The run of a model that is not there.

        Args:
          lora: None trains every weight.
          quantization: None keeps the base in `dtype`.
          offload_embedding: whether the embedding's table is in host memory.
        """

        if lora is None:
            # What is trained in full is float32 in memory.
            model = CausalLM.abstract(config, dtype=dtype, param_dtype=jnp.float32)
            graphdef, trainable, frozen = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
        else:
            model = nnx.eval_shape(lambda: apply_lora(abstract_model(config, dtype), lora, jax.random.key(0)))
            if quantization is not None:
                _pack(model, config, dtype, quantization)
            graphdef, trainable, frozen = split_trainable(model, method)
        if offload_embedding:
            frozen, _ = take_table(frozen)
        optimizer = make_optimizer(lambda step: 1e-4, optim=optim)
        return cls(graphdef, trainable, frozen, jax.eval_shape(optimizer.init, trainable), optimizer)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Of the frozen weights, the trained ones, and the optimiser's states."""
        trees = {"weights": self.frozen, "trained": self.trainable, "optimizer": self.opt_state}
        return {name: num_bytes(tree) for name, tree in trees.items()}

    def placed(self, mesh: Mesh) -> tuple[Any, Any, Any]:
        """(trainable, opt_state, frozen), each leaf with the sharding that a run gives it."""
        config = nnx.merge(self.graphdef, self.trainable, self.frozen).config
        return (
            _placed(self.trainable, trained_shardings(config, mesh, self.trainable)),
            _placed(self.opt_state, state_shardings(config, mesh, self.opt_state, self.trainable)),
            _placed(self.frozen, frozen_shardings(config, mesh, self.frozen)),
        )

    def bytes_on(self, mesh: Mesh) -> dict[str, int]:
        """`num_bytes` of what one device of the mesh holds."""
        trainable, opt_state, frozen = self.placed(mesh)
        trees = {"weights": frozen, "trained": trainable, "optimizer": opt_state}
        return {name: num_bytes(tree, per_device=True) for name, tree in trees.items()}

    def compile(self, plan: RematPlan, batch: dict[str, jax.ShapeDtypeStruct], mesh: Mesh) -> Any:
        """jax's compiled step for the mesh's devices, which may be described ones."""
        step: Any = make_train_step(self.graphdef, self.optimizer, mesh=mesh, remat=plan)
        arguments = [
            *self.placed(mesh),
            _placed(batch, batch_shardings(batch, mesh)),
            _placed(jax.eval_shape(lambda: jax.random.key(0)), replicated(mesh)),
        ]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(mesh.devices.flat[0]):
            return step.trace(*arguments).lower().compile()


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)


def abstract_batch(
    accumulation: int, num_rows: int, seq: int, *, packed: bool, rows: tuple[int, Any] | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """[A, B, T] arrays as the pipeline hands them out.

    Args:
      rows: (width, dtype) of the embedding's rows that the batch brings; None: it brings none.
    """
    shape = (accumulation, num_rows, seq)
    names = ("input_ids", "segment_ids", "positions") if packed else ("input_ids", "segment_ids")
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
    if rows is not None:
        arrays[ROWS] = jax.ShapeDtypeStruct((*shape, rows[0]), rows[1])
    return arrays | {"loss_mask": jax.ShapeDtypeStruct(shape, jnp.bool_)}


def _pack(model: CausalLM, config: ModelConfig, dtype: Any, quantization: QuantConfig) -> None:
    """Makes the linear weights of an abstract model with adapters 4-bit."""
    packed = abstract_model(config, dtype, quantization)
    for path, linear in quantized_linears(packed).items():
        module_at(model, tuple(str(name) for name in path)).weight = linear.weight
