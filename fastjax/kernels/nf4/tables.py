"""The number tables of bitsandbytes' 4-bit formats, as numpy float32.

Source: QLoRA (arXiv:2305.14314), appendix E, for NF4; Dettmers et al. 2015 (arXiv:1511.04561) for the dynamic 8-bit
map that codes the block scales. The values are those of bitsandbytes 0.50, bit for bit.
"""

from functools import lru_cache

import numpy as np

BLOCK_SIZE = 64
NESTED_BLOCK_SIZE = 256
# Stored for an all-zero partial block, and the floor under every divisor: bitsandbytes clamps there.
SMALLEST_ABSMAX = 1e-38

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)

CODES: dict[str, np.ndarray] = {
    "nf4": np.array(_NF4, np.float32),
    # Bit 3 is the sign; magnitudes are stored over 12 so that the largest is 1. Minus zero reads as plus zero.
    "fp4": np.array([s * m for s in (1.0, -1.0) for m in _FP4_MAGNITUDES], np.float32) / np.float32(12) + np.float32(0),
}


@lru_cache
def decision_bounds(quant_type: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """15 bounds and the 16 codes between them: a value above exactly i bounds gets order[i]; on a bound, the lower."""
    codes = CODES[quant_type]
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    bounds = (ordered[:-1] + ordered[1:]) / np.float32(2)
    return tuple(map(float, bounds)), tuple(map(int, order))


@lru_cache
def byte_pairs(quant_type: str) -> tuple[np.ndarray, np.ndarray]:
    """(high, low): two float32 [256] tables, the values of a byte's earlier (high nibble) and later weight."""
    codes = CODES[quant_type]
    byte = np.arange(256)
    return codes[byte >> 4], codes[byte & 15]


def _linspace(start: float, stop: float, num: int) -> np.ndarray:
    """float32 steps from both ends to the middle, each rounded once, as torch.linspace counts them."""
    first, last = np.float64(np.float32(start)), np.float64(np.float32(stop))
    step = np.float64((np.float32(stop) - np.float32(start)) / np.float32(num - 1))
    index = np.arange(num)
    return np.where(index < num // 2, first + step * index, last - step * (num - 1 - index)).astype(np.float32)


@lru_cache
def dynamic_map(signed: bool = True) -> np.ndarray:
    """float32 [256], ascending: the dynamic map in which block scales and optimiser states are coded.

    The signed map covers [-1, 1]; the unsigned one covers [0, 1] with twice the values.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = _linspace(0.1, 1.0, 2 ** (exponent + (not signed)) + 1)
        means = np.float32(10.0 ** (exponent - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [*means, *(-means if signed else ())]
    return np.sort(np.array(values, np.float32))


NESTED_STEPS = 65536


@lru_cache
def nested_codes() -> np.ndarray:
    """uint8 [65536]: the nearest dynamic-map code of each of 65536 even steps from -1 to 1.

    bitsandbytes' CPU library codes scales through such a table, so a scale within 1.5e-5 of the midpoint of two
    codes may get the further one. Its CUDA library searches exactly; both read each other's codes.
    """
    steps = -1 + np.arange(NESTED_STEPS) * (2.0 / (NESTED_STEPS - 1))
    values = dynamic_map().astype(np.float64)
    right = np.clip(np.searchsorted(values, steps), 1, 255)
    nearer_left = np.abs(steps - values[right - 1]) <= np.abs(values[right] - steps)
    return (right - nearer_left).astype(np.uint8)
