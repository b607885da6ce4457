"""What a model does on one device of a mesh, inside `jax.shard_map`: its collectives, written out.

Every device differentiates its own copy of the loss, so the collectives are pairs with the backward written down:
`enter` (identity, and a sum of the gradients) stands before what the tensor ranks share out, `leave` (a sum, and
identity) behind it, and `gather_stored` (all-gather, reduce-scatter) before a weight that is kept in parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from fastjax.kernels.nf4 import QuantizedWeight
from fastjax.kernels.nf4.reference import decode_absmax
from fastjax.kernels.nf4.tables import BLOCK_SIZE, NESTED_BLOCK_SIZE
from fastjax.models.layers import DropoutKey, Linear
from fastjax.models.quantized import MixedWeight
from fastjax.models.sharding import BATCH_AXES, Layout, dim_of, leaf_name


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: jax.Array, axis: str) -> jax.Array:
    """x, whose gradient is the sum of what the ranks along `axis` make of it."""
    return x


enter.defvjp(lambda x, axis: (x, None), lambda axis, _, dx: (jax.lax.psum(dx, axis),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(x: jax.Array, axis: str) -> jax.Array:
    """The sum of x over the ranks along `axis`; each rank's gradient is the sum's own."""
    return jax.lax.psum(x, axis)


leave.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, dx: (dx,))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_stored(x: jax.Array, axis: str, dim: int, dtype: Any) -> jax.Array:
    """The whole of a trained weight, in `dtype`; its gradient is summed in float32 and each rank gets its part."""
    return jax.lax.all_gather(x.astype(dtype), axis, axis=dim, tiled=True)


gather_stored.defvjp(
    lambda x, axis, dim, dtype: (gather_stored(x, axis, dim, dtype), jnp.zeros((0,), x.dtype)),
    lambda axis, dim, dtype, like, dx: (
        jax.lax.psum_scatter(dx.astype(jnp.float32), axis, scatter_dimension=dim, tiled=True).astype(like.dtype),
    ),
)


@dataclass(frozen=True)
class Parallel:
    """One device's part in a model. The default is a device on its own, for which every method is the identity.

    Attributes:
      layout: of the model on the mesh; None for a device on its own.
      specs: name of each weight's leaf -> how it is split.
      split_rows: whether the rows of a batch are split; if not, every device has all of them.
    """

    layout: Layout | None = None
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    split_rows: bool = True

    @classmethod
    def of(cls, layout: Layout, trainable: Any, frozen: Any, *, split_rows: bool = True) -> "Parallel":
        """For the weights of a model, given with their whole shapes."""
        specs: dict[str, PartitionSpec] = {}
        for tree, trained in ((trainable, True), (frozen, False)):
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                specs[leaf_name(path)] = layout.spec(leaf_name(path), leaf.shape, trained=trained)
        return cls(layout, specs, split_rows)

    @property
    def num_tensor(self) -> int:
        return 1 if self.layout is None else self.layout.tensor

    @property
    def tensor_rank(self) -> jax.Array | int:
        return jax.lax.axis_index("tensor") if self.num_tensor > 1 else 0

    @property
    def num_kv_heads(self) -> int | None:
        """Key/value heads on this device; None for all of the model's."""
        if self.layout is None:
            return None
        return max(1, self.layout.config.num_key_value_heads // self.layout.tensor)

    @property
    def vocab_axis(self) -> str | None:
        """The mesh axis that splits the vocabulary, if one does."""
        return "tensor" if self.layout is not None and self.layout.splits_vocab else None

    @property
    def gathers(self) -> bool:
        """Whether a layer's weights are gathered when it runs."""
        return self.layout is not None and self.layout.fsdp > 1

    def enter(self, x: jax.Array) -> jax.Array:
        """x on its way into what the tensor ranks share out."""
        return enter(x, "tensor") if self.num_tensor > 1 else x

    def leave(self, x: jax.Array) -> jax.Array:
        """The sum of the tensor ranks' shares."""
        return leave(x, "tensor") if self.num_tensor > 1 else x

    def first_row(self, num_rows: int) -> jax.Array | int:
        """The index in the whole batch of this device's first row, of which it has `num_rows`."""
        if self.layout is None or not self.split_rows:
            return 0
        return jax.lax.axis_index(BATCH_AXES) * num_rows

    def dropout_key(self, rng: jax.Array, num_rows: int, *, split: bool = False) -> DropoutKey:
        """The key of an input whose rows, `num_rows` here, and whose features, if `split`, are shared out."""
        parts = (self.tensor_rank, self.num_tensor) if split else (0, 1)
        return DropoutKey(rng, self.first_row(num_rows), *parts)

    def row_product(self, linear: Linear, x: jax.Array, rng: Any) -> jax.Array:
        """What a Linear makes of x where its inputs are split over the tensor ranks: the bias is added once."""
        if self.num_tensor == 1:
            return linear(x, rng)
        y = self.leave(linear.product(x, rng))
        return y if linear.bias is None else y + linear.bias[...].astype(y.dtype)

    def layer(self, state: nnx.State, dtype: Any) -> nnx.State:
        """One layer's weights, given as they are kept, as this device computes with them."""
        if self.layout is None or self.layout.fsdp * self.layout.tensor == 1:
            return state
        flat = nnx.to_flat_state(state)
        return nnx.from_flat_state(
            [
                (path, variable.replace(self._whole(f"layers.{'.'.join(map(str, path))}", variable.get_value(), dtype)))
                for path, variable in flat
            ]
        )

    def table(self, name: str, value: Any, dtype: Any) -> Any:
        """The embedding's or the head's weight, whole or this rank's part of the vocabulary."""
        if isinstance(value, QuantizedWeight):
            return value if self.layout is None else self._quantized(name, value, stacked=0)
        spec = self.specs.get(name)
        dim = None if spec is None else dim_of("fsdp", spec)
        return value if dim is None or not self.gathers else gather_stored(value, "fsdp", dim, dtype)

    def look_up(self, weight: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
        """Rows of the embedding, of which this device may have a part."""
        weight = self.table("embed_tokens.weight", weight, weight.dtype)
        if self.vocab_axis is None:
            return weight[ids].astype(dtype)
        local = ids - jax.lax.axis_index(self.vocab_axis) * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        rows = weight[jnp.clip(local, 0, weight.shape[0] - 1)].astype(dtype)
        return self.leave(jnp.where(here[..., None], rows, 0))

    def whole_vocabulary(self, logits: jax.Array) -> jax.Array:
        """[..., V] logits from each tensor rank's part: for the few tokens that one is drawn from."""
        if self.vocab_axis is None:
            return logits
        return jax.lax.all_gather(logits, self.vocab_axis, axis=logits.ndim - 1, tiled=True)

    def summed_gradients(self, gradients: Any) -> Any:
        """Each device's part of the whole batch's gradients, from those of its own rows."""
        if self.layout is None:
            return gradients
        treedef: Any
        flat, treedef = jax.tree_util.tree_flatten_with_path(gradients)
        by_axes: dict[tuple[str, ...], list[int]] = {}
        for index, (path, _) in enumerate(flat):
            by_axes.setdefault(self.gradient_axes(leaf_name(path)), []).append(index)
        leaves = [leaf for _, leaf in flat]
        for axes, indices in by_axes.items():
            summed = jax.lax.psum([leaves[index] for index in indices], axes) if axes else []
            for index, leaf in zip(indices, summed, strict=False):
                leaves[index] = leaf
        return treedef.unflatten(leaves)

    def summed_over_rows(self, sums: Any) -> Any:
        """Sums over the whole batch, from those over this device's rows."""
        return sums if self.layout is None else jax.lax.psum(sums, BATCH_AXES)

    def gradient_axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes over which a gradient is still to be summed; that of a stored part is summed over `fsdp`."""
        assert self.layout is not None
        spec = self.specs[name]
        axes = [axis for axis in BATCH_AXES if getattr(self.layout, axis) > 1 and dim_of(axis, spec) is None]
        return (*axes, "tensor") if self.layout.is_partial(name, spec) else tuple(axes)

    def _whole(self, name: str, value: Any, dtype: Any) -> Any:
        if isinstance(value, MixedWeight):
            assert value.layer is not None
            row = value.traced_row()
            quantized = self._quantized(f"{name}.quantized", value.quantized.at(row).one_layer())
            dense = jax.lax.dynamic_index_in_dim(value.dense, row, keepdims=False)
            dense = self._float(f"{name}.dense", dense, dtype)
            quantized, dense = jax.tree.map(lambda leaf: leaf[None], (quantized, dense))
            return replace(value, quantized=quantized, dense=dense)
        if isinstance(value, QuantizedWeight):
            return self._quantized(name, value.one_layer())
        return self._float(name, value, dtype)

    def _float(self, name: str, value: jax.Array, dtype: Any) -> jax.Array:
        dim = dim_of("fsdp", self.specs[name])
        if dim is not None and self.gathers:
            value = gather_stored(value, "fsdp", dim - 1, dtype)
        return self._own_head(name, value) if not name.endswith("lora_a") and value.ndim else value

    def _own_head(self, name: str, value: jax.Array) -> jax.Array:
        """Of a key or value projection that is whole everywhere, the rows of the head that this rank uses."""
        layout = self.layout
        assert layout is not None
        if not layout.repeats_kv or not any(f".{module}." in name for module in ("k_proj", "v_proj")):
            return value
        head = self.tensor_rank // (layout.tensor // layout.config.num_key_value_heads)
        num = value.shape[0] // layout.config.num_key_value_heads
        return jax.lax.dynamic_slice_in_dim(value, head * num, num, axis=0)

    def _quantized(self, name: str, weight: QuantizedWeight, stacked: int = 1) -> QuantizedWeight:
        """The weight with this device's arrays in one piece. 4-bit bytes are gathered; nothing is decoded before.

        Where the tensor ranks have a part each, its block scales are decoded here: a part may begin amid a nested
        block, and kernels count nested blocks from the first block that they are given.
        """
        specs = [self.specs[f"{name}.{part}"][stacked:] for part in ("codes", "absmax")]
        codes, absmax = map(self._gathered, specs, (weight.codes, weight.absmax))
        if self.num_tensor == 1:
            return replace(weight, codes=codes, absmax=absmax)
        if weight.nested:
            absmax = self._decoded(specs[0], weight, absmax)
        codes, absmax = self._own_head(f"{name}.codes", codes), self._own_head(f"{name}.absmax", absmax)
        return replace(
            weight, codes=codes, absmax=absmax, nested_scale=None, nested_offset=None, nested_table=None,
            shape=(codes.shape[0], 2 * codes.shape[1]),
        )  # fmt: skip

    def _gathered(self, spec: Sequence[Any], part: jax.Array) -> jax.Array:
        dim = dim_of("fsdp", spec)
        return part if dim is None or not self.gathers else jax.lax.all_gather(part, "fsdp", axis=dim, tiled=True)

    def _decoded(self, spec: Sequence[Any], weight: QuantizedWeight, absmax: jax.Array) -> jax.Array:
        """float32 block scales of this rank's part, each with the nested scale of its place in the whole weight."""
        assert weight.nested_scale is not None and weight.nested_offset is not None and weight.nested_table is not None
        dim = dim_of("tensor", spec)
        first: list[Any] = [0, 0]
        if dim is not None:
            first[dim] = self.tensor_rank * absmax.shape[dim]
        row = first[0] + jnp.arange(absmax.shape[0])[:, None]
        column = first[1] + jnp.arange(absmax.shape[1])
        block = row * (weight.shape[1] // BLOCK_SIZE) + column
        scale = weight.nested_scale[block // NESTED_BLOCK_SIZE]
        return decode_absmax(weight.nested_table[absmax.astype(jnp.int32)], scale, weight.nested_offset)


ALONE = Parallel()
