"""An opened model and its unread tensors: the words that readers of every file kind share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fastjax.kernels.nf4 import QuantizedWeight
from fastjax.models.quant_config import QuantConfig


@dataclass(frozen=True)
class PackedFormat:
    """The form of a 4-bit weight: quant_type, whether block scales are nested, and the numpy name of its dtype."""

    quant_type: str
    nested: bool
    dtype: str


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read. `dtype` is the numpy name of what `read` returns.

    A 4-bit weight has `packed`; its shape and dtype are those of the matrix that it stands for.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    packed: PackedFormat | None = None


class TensorSource(Protocol):
    """Tensors under HF's names, read one at a time."""

    def names(self) -> list[str]:
        """Every tensor's HF name, in file order."""

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and file of the tensor `name`."""

    def read(self, name: str) -> np.ndarray | QuantizedWeight:
        """The tensor `name`, C-contiguous, maybe a read-only map of the file; drop it before the next one.

        A 4-bit weight is a QuantizedWeight of such arrays.
        """

    def describe(self) -> str:
        """The file or files, for messages."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: HF's config.json as a dict, the tensors, and where they came from.

    Attributes:
      name: the model argument as it was given.
      folder: the HF folder, or the folder that the GGUF file lies in.
      config: contents of config.json; for GGUF the same keys, made from the file's metadata.
      generation_config: contents of generation_config.json or None.
      tensors: the weights.
      quantization: which of them are 4-bit and how; None if none is.
      gguf: the GGUF file or None.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: TensorSource
    gguf: Path | None = None
    quantization: QuantConfig | None = None
