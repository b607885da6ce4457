"""The plan that a memory budget gets: what is kept, what is computed again, and what is said where nothing fits."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fastjax.errors import DeviceMemoryError
from fastjax.models.config import ModelConfig
from fastjax.models.presets import preset
from fastjax.models.remat import POLICIES, RematPlan, parse_plan
from fastjax.train.plan.choose import Workload, choose_plan
from fastjax.train.plan.costs import host_bytes, kept_bytes, layer_costs, recomputed_flop, step_flop
from fastjax.train.plan.search import ladder, richest

LLAMA = ModelConfig.from_hf(preset("llama3-8b"))
WORK = Workload(seq=2048, num_tokens=8192)
GIB = 2**30


def test_bytes_of_a_layer_are_those_of_its_activations():
    costs = layer_costs(LLAMA, 2048)
    assert costs.num_bytes["gate"] == costs.num_bytes["up"] == 14336 * 2
    assert costs.num_bytes["key"] == costs.num_bytes["value"] == 8 * 128 * 2
    assert costs.num_bytes["attn_lse"] == 32 * 4
    assert costs.kept_bytes(POLICIES["full"]) == 4096 * 2
    assert costs.kept_bytes(POLICIES["offload"]) == 0 and costs.host_bytes(POLICIES["offload"]) == 4096 * 2


def test_flop_of_a_step_are_those_of_its_matmuls_and_of_what_is_made_again():
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 128256
    assert step_flop(LLAMA, 1) == pytest.approx(4 * weights, rel=1e-4)
    assert recomputed_flop(parse_plan("none"), LLAMA, 2048) == 0
    assert recomputed_flop(parse_plan("no_matmul"), LLAMA, 2048) == 0
    # All but the down projection, whose output no backward reads.
    again = 32 * 2 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 4096 * 14336)
    assert recomputed_flop(parse_plan("full"), LLAMA, 1) == pytest.approx(again, rel=1e-3)


def test_the_ladder_keeps_more_with_every_step():
    plans = ladder(32)
    kept = [kept_bytes(plan, LLAMA, 2048, 8192) for plan in plans]
    again = [recomputed_flop(plan, LLAMA, 2048) for plan in plans]
    assert kept == sorted(set(kept)) and np.all(np.diff(again) < 1)
    assert str(plans[0]) == "32*offload" and str(plans[-1]) == "32*no_matmul"
    assert host_bytes(plans[0], LLAMA, 2048, 8192) == 32 * 8192 * 4096 * 2


@pytest.mark.parametrize("budget", [8, 9, 12, 16, 24, 32, 64])
def test_the_richest_plan_fits_and_the_next_does_not(budget):
    common = {"seq": 2048, "num_tokens": 8192, "itemsize": 2, "budget": budget * GIB, "fixed": int(7.8 * GIB)}
    plan = richest(LLAMA, **common)
    plans = ladder(32)
    place = plans.index(plan)
    room = common["budget"] - common["fixed"]
    assert kept_bytes(plan, LLAMA, 2048, 8192) <= room
    assert place == len(plans) - 1 or kept_bytes(plans[place + 1], LLAMA, 2048, 8192) > room


@dataclass
class Compiler:
    """A step that needs `workspace` bytes beside what its plan keeps."""

    workspace: int
    arguments: int = int(5.8 * GIB)
    count: int = 0

    def __call__(self, plan: RematPlan) -> SimpleNamespace:
        self.count += 1
        report = SimpleNamespace(
            argument_size_in_bytes=self.arguments,
            temp_size_in_bytes=self.workspace + kept_bytes(plan, LLAMA, WORK.seq, WORK.num_tokens),
            output_size_in_bytes=GIB,
            alias_size_in_bytes=GIB,
            host_temp_size_in_bytes=host_bytes(plan, LLAMA, WORK.seq, WORK.num_tokens),
        )
        return SimpleNamespace(memory_analysis=lambda: report)


@pytest.mark.parametrize("budget", [8.5, 12, 16, 24, 40])
@pytest.mark.parametrize("workspace", [0.9, 2.1])
def test_the_choice_fits_and_fills_its_budget(budget, workspace):
    compiler = Compiler(int(workspace * GIB))
    choice = choose_plan(LLAMA, WORK, budget=int(budget * GIB), arguments=compiler.arguments, compile_step=compiler)
    assert choice.memory.peak <= budget * GIB
    best = ladder(32)[-1]
    left = budget * GIB - choice.memory.peak
    everything = kept_bytes(best, LLAMA, WORK.seq, WORK.num_tokens)
    assert choice.plan == best or left < 0.05 * everything + 0.02 * budget * GIB
    assert compiler.count <= 3


def test_what_does_not_fit_says_by_how_much_and_what_would():
    compiler = Compiler(2 * GIB)
    with pytest.raises(DeviceMemoryError) as error:
        choose_plan(LLAMA, WORK, budget=7 * GIB, arguments=compiler.arguments, compile_step=compiler)
    assert "8,192 tokens needs 7.80 GiB, 0.91 more" in str(error.value)
    assert "per_device_train_batch_size=2" in str(error.value)
    with pytest.raises(DeviceMemoryError, match="method=qlora, or more memory"):
        choose_plan(LLAMA, WORK, budget=5 * GIB, arguments=compiler.arguments, compile_step=compiler)


def test_a_described_gpu_confirms_the_cost_model():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin is missing; `make test` installs it")
    from fastjax.plan import PlanConfig
    from fastjax.train.plan.report import make_report

    common = {"model": "smollm2-135m", "gpu": "H200", "max_seq_length": 512, "gradient_accumulation_steps": 1}
    rich = make_report(PlanConfig(**common), frozenset())
    assert rich.fits and rich.policy == "30*no_matmul"
    lean = make_report(PlanConfig(**common, remat="full"), frozenset())
    # What one plan keeps more than the other is what its peak is higher by.
    saved = rich.parts["activations"] - lean.parts["activations"]
    assert np.isclose(rich.peak - lean.peak, saved, rtol=0.25)
    assert rich.step_time_s < lean.step_time_s
    assert sum(rich.parts.values()) == rich.peak
    assert jax.default_backend() == "cpu"
