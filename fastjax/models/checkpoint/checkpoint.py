"""An opened model and its unread tensors: the words that readers of every file kind share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read. `dtype` is the numpy name of what `read` returns."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class TensorSource(Protocol):
    """Tensors under HF's names, read one at a time."""

    def names(self) -> list[str]:
        """Every tensor's HF name, in file order."""

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and file of the tensor `name`."""

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`, C-contiguous, maybe a read-only map of the file; drop it before the next one."""

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
      gguf: the GGUF file or None.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: TensorSource
    gguf: Path | None = None
