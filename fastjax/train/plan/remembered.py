"""Plans that were found before, in the user's cache folder: a run like an earlier one need not search again."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from fastjax.devices import user_cache
from fastjax.errors import UserError
from fastjax.models.config import ModelConfig
from fastjax.models.remat import RematPlan, parse_plan
from fastjax.train.plan.costs import Workload
from fastjax.version import __version__

# Raised whenever the file of an equal key would be read otherwise.
_FORMAT = 1
# Budgets that differ by less share a plan: what other processes hold is never quite the same.
_BUDGET_STEP = 64 * 2**20


def plan_file(config: ModelConfig, work: Workload, *, gpu: str, budget: int, **more: Any) -> Path:
    """Where the plan of a model, shape, GPU and budget is kept, for this version of jax and of fastjax.

    Args:
      more: whatever else the step depends on, as JSON takes it.
    """
    content = {
        "format": _FORMAT,
        "versions": [jax.__version__, __version__],
        "model": asdict(config),
        "work": asdict(work),
        "gpu": gpu,
        "budget": budget // _BUDGET_STEP,
        **more,
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return user_cache() / "plans" / f"{hashlib.blake2b(text.encode(), digest_size=20).hexdigest()}.json"


def recall(file: Path, num_layers: int, say: Callable[[str], None]) -> tuple[RematPlan, int] | None:
    """The plan and its peak in bytes; None where there is none, or, with a note, where it cannot be read."""
    try:
        content = json.loads(file.read_text())
        plan, peak = parse_plan(content["plan"]), content["peak"]
        list(plan.of_layers(num_layers))
        if not isinstance(peak, int) or isinstance(peak, bool):
            raise TypeError(f"peak is {peak!r}, not a number of bytes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        say(f"note: the plan remembered in {file} is passed over: {str(error)[:80] or type(error).__name__}")
        return None
    return plan, peak


def remember(file: Path, plan: RematPlan, peak: int) -> None:
    """Keeps a plan for the next run; a folder that cannot be written keeps none."""
    content: Mapping[str, Any] = {"plan": str(plan), "peak": peak}
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content))
        temporary.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
