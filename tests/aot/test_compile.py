"""Every Pallas kernel compiles for GPUs that are not here, at the shapes that its specs.py lists."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fastjax
from fastjax.gpu_targets import TARGETS, compile_for, target_mesh
from fastjax.kernels.nf4 import abstract_weight
from fastjax.kernels.quant_matmul.blocks import Tiles
from fastjax.kernels.quant_matmul.pallas_triton import quant_matmul_pallas

KERNELS = Path(fastjax.__file__).parent / "kernels"


def cases() -> list[Any]:
    """One parameter an op's case: op, name, function, abstract arguments."""
    found = []
    for file in sorted(KERNELS.glob("*/specs.py")):
        specs = importlib.import_module(f"fastjax.kernels.{file.parent.name}.specs")
        for name, function, arguments in specs.compile_cases():
            found.append(pytest.param(function, arguments, id=f"{file.parent.name}: {name}"))
    return found


@pytest.fixture(scope="module")
def compiler() -> Callable:
    """`compile_for`, where jax's CUDA plugin is installed; it needs no GPU."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin is missing; `make test` installs it")
    target_mesh("H200")
    return compile_for


@pytest.mark.parametrize("gpu", TARGETS)
@pytest.mark.parametrize(("function", "arguments"), cases())
def test_kernel_compiles(compiler: Callable, gpu: str, function: Callable, arguments: tuple[Any, ...]) -> None:
    compiled = compiler(gpu, function, *arguments)
    assert "triton" in compiled.as_text()


def test_an_oversized_tile_is_refused_by_the_compiler(compiler: Callable) -> None:
    tiles = Tiles(rows=16, out=256, blocks=32, splits=1, num_warps=8)
    x = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
    with pytest.raises(Exception, match="(?i)shared memory"):
        compiler("RTX 4090", partial(quant_matmul_pallas, tiles=tiles), x, abstract_weight((256, 4096)))
