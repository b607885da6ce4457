"""What a call of attention asks for besides its arrays."""

import math
from dataclasses import dataclass

# Kernels count in powers of 2.
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Options:
    """Static settings, hashable; their meanings stand in `fastjax.kernels.attention.attention`.

    Attributes:
      scale: already chosen, never None.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    dropout_rate: float = 0.0
