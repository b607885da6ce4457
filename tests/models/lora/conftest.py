"""An adapter made by PEFT on a tiny model, and the ways to look at it."""

from typing import Any

import pytest

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]]


def make_peft_adapter(hf_model: Any, seed: int = 1, **settings: Any) -> Any:
    """A PeftModel whose B and trained copies are moved away from their start, so that everything shows."""
    import peft
    import torch

    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6, **settings})
    model = peft.get_peft_model(hf_model, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session")
def peft_adapter():
    """make_peft_adapter(hf_model, seed=1, **LoraConfig fields)."""
    return make_peft_adapter


@pytest.fixture(scope="session")
def ids():
    """[2, 10] token ids below every tiny vocabulary."""
    import numpy as np

    return np.array(IDS, np.int32)
