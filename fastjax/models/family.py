"""What sets one model family apart; each family is a small file that fills this in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """What sets one model_type apart from the others.

    Attributes:
      model_type: HF's name in config.json.
      architecture: HF's class name, written to config.json.
      defaults: HF's values for keys that config.json may leave out.
      keys: config.json keys that this family handles beside the common ones.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    keys: frozenset[str] = frozenset()
