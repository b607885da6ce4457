"""Where a kernel runs: in jax's interpreter on any machine, and compiled on a GPU with `pytest -m gpu`."""

import pytest


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpreted", "compiled"])
def interpret(request: pytest.FixtureRequest) -> bool:
    """Whether Pallas kernels are interpreted. Compiled: JAX_PLATFORMS=cuda python -m pytest -m gpu."""
    return request.param
