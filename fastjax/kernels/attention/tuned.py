"""Tiles that were the fastest on a GPU, as `python -m benchmarks.attention --tune` wrote them.

(compute capability, direction, padded head size, bytes a number) -> the fields of blocks.Tiles.
"""

TUNED: dict[tuple[str, str, int, int], tuple[int, int, int, int, int, bool]] = {
    ("9.0", "dkey_dvalue", 64, 2): (64, 64, 4, 3, 4096, False),
    ("9.0", "dkey_dvalue", 128, 2): (64, 64, 4, 2, 4096, False),
    ("9.0", "dkey_dvalue", 256, 2): (64, 64, 8, 2, 4096, False),
    ("9.0", "dquery", 64, 2): (128, 64, 8, 3, 24, False),
    ("9.0", "dquery", 128, 2): (128, 64, 8, 3, 4096, False),
    ("9.0", "dquery", 256, 2): (64, 32, 4, 3, 4096, False),
    ("9.0", "forward", 64, 2): (128, 64, 8, 3, 24, False),
    ("9.0", "forward", 128, 2): (64, 64, 4, 3, 4096, True),
    ("9.0", "forward", 256, 2): (128, 64, 8, 2, 24, False),
}
