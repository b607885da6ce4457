"""A 4-bit weight as one pytree; its bytes are bitsandbytes'."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES, NESTED_BLOCK_SIZE


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "absmax", "nested_scale", "nested_offset", "nested_table", "layer"),
    meta_fields=("shape", "quant_type", "dtype"),
)
@dataclass(frozen=True)
class QuantizedWeight:
    """One [out, in] matrix in blocks of 64 along its row-major elements, or a stack of such for a layer scan.

    value[i] = table[code[i]] * absmax[i // 64], rounded to `dtype`
    absmax[j] = nested_table[absmax code[j]] * nested_scale[j // 256] + nested_offset, or float32 when not nested

    Invariants (`check` proves them): two codes a byte, the earlier element in the high nibble; an odd number of
    elements pads the last low nibble. Arrays are 2-D where in % 64 == 0, so that rows can be split, and flat where a
    block may straddle rows. The three nested fields are all there or all None. Every array may have one leading layer
    axis more; `shape` stays that of one layer.

    Attributes:
      codes: uint8 [out, in/2], or flat [ceil(out*in / 2)].
      absmax: [out, in/64], or flat [ceil(out*in / 64)]; uint8 codes when nested, else float32.
      nested_scale: float32 [ceil(blocks / 256)].
      nested_offset: float32 scalar.
      nested_table: float32 [256].
      shape: (out, in).
      quant_type: "nf4" or "fp4".
      dtype: of the weight before it was quantised; the values that it stands for are rounded to it.
      layer: int32 scalar, or None. With it the arrays keep their layer axis and the weight is that layer of them (see
        `at`): a kernel reads its bytes where they lie, and no scan has to copy them out of the stack first.
    """

    codes: jax.Array
    absmax: jax.Array
    nested_scale: jax.Array | None
    nested_offset: jax.Array | None
    nested_table: jax.Array | None
    shape: tuple[int, int]
    quant_type: str
    dtype: np.dtype
    layer: jax.Array | None = None

    @property
    def nested(self) -> bool:
        return self.nested_scale is not None

    @property
    def stack(self) -> tuple[int, ...]:
        """(number of layers,) of a stack, () of one layer."""
        if self.layer is not None:
            return ()
        return self.codes.shape[: self.codes.ndim - (2 if self.shape[1] % BLOCK_SIZE == 0 else 1)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, layers included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def at(self, layer: jax.Array | int) -> "QuantizedWeight":
        """One layer of a stack, without a copy."""
        return replace(self, layer=jnp.asarray(layer, jnp.int32))

    def one_layer(self) -> "QuantizedWeight":
        """This weight with arrays of its own: where `layer` is set, that layer is copied out of the stack."""
        if self.layer is None:
            return self
        stack = replace(self, layer=None)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, self.layer, keepdims=False), stack)

    def check(self) -> "QuantizedWeight":
        """This weight.

        Raises: ValueError naming the field that breaks an invariant.
        """
        if self.quant_type not in CODES:
            raise ValueError(f"quant_type={self.quant_type!r} is unknown; known: {', '.join(CODES)}")
        nested_fields = (self.nested_scale, self.nested_offset, self.nested_table)
        if any(field is None for field in nested_fields) != all(field is None for field in nested_fields):
            raise ValueError("nested_scale, nested_offset and nested_table go together: give all three or none")
        expected = packed_shapes(self.shape, nested=self.nested)
        layers = self.codes.shape[: self.codes.ndim - len(expected["codes"][0])]
        if len(layers) > 1:
            raise ValueError(f"codes {self.codes.shape}: expected {expected['codes'][0]} and at most one layer axis")
        if self.layer is not None and not layers:
            raise ValueError(f"layer={self.layer} of codes {self.codes.shape}, which have no layer axis")
        for name, (shape, dtype) in expected.items():
            array = getattr(self, name)
            if array is None:
                raise ValueError(f"{name} is missing; a {self.shape} {self.quant_type} weight needs {dtype} {shape}")
            if array.shape != (*layers, *shape) or array.dtype != dtype:
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}; a {self.shape} {self.quant_type} weight with "
                    f"blocks of {BLOCK_SIZE} needs {dtype} {(*layers, *shape)}"
                )
        return self


def packed_shapes(shape: tuple[int, int], *, nested: bool = True) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each array of one layer's QuantizedWeight, by field name."""
    num_rows, num_columns = shape
    num_blocks = -(-num_rows * num_columns // BLOCK_SIZE)
    if num_columns % BLOCK_SIZE == 0:
        codes: tuple[int, ...] = (num_rows, num_columns // 2)
        absmax: tuple[int, ...] = (num_rows, num_columns // BLOCK_SIZE)
    else:
        codes, absmax = (-(-num_rows * num_columns // 2),), (num_blocks,)
    uint8, float32 = np.dtype(np.uint8), np.dtype(np.float32)
    fields = {"codes": (codes, uint8), "absmax": (absmax, uint8 if nested else float32)}
    if nested:
        fields["nested_scale"] = ((-(-num_blocks // NESTED_BLOCK_SIZE),), float32)
        fields["nested_offset"] = ((), float32)
        fields["nested_table"] = ((256,), float32)
    return fields


def abstract_weight(
    shape: tuple[int, int],
    *,
    nested: bool = True,
    quant_type: str = "nf4",
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    num_layers: int | None = None,
) -> QuantizedWeight:
    """A QuantizedWeight of jax.ShapeDtypeStruct leaves: what a loader fills and what a compiler is shown."""
    layers = () if num_layers is None else (num_layers,)
    leaves: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((*layers, *leaf_shape), leaf_dtype)
        for name, (leaf_shape, leaf_dtype) in packed_shapes(shape, nested=nested).items()
    }
    absent: dict[str, Any] = dict.fromkeys(("nested_scale", "nested_offset", "nested_table"))
    return QuantizedWeight(**(absent | leaves), shape=shape, quant_type=quant_type, dtype=jnp.dtype(dtype))
