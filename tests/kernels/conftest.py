"""Where a kernel runs: in jax's interpreter on any machine, and compiled on a GPU with `pytest -m gpu`."""

import pytest

# jax 0.11 and later say so at every compilation.
_DEPRECATED = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


@pytest.fixture(
    params=[True, pytest.param(False, marks=[pytest.mark.gpu, _DEPRECATED])], ids=["interpreted", "compiled"]
)
def interpret(request: pytest.FixtureRequest) -> bool:
    """Whether Pallas kernels are interpreted. Compiled: JAX_PLATFORMS=cuda python -m pytest -m gpu."""
    return request.param
