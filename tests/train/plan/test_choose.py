"""The plan that a memory budget gets: what is kept, what is computed again, and what is said where nothing fits."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import DeviceMemoryError
from fastjax.models.config import ModelConfig
from fastjax.models.lora import LoraConfig
from fastjax.models.presets import preset
from fastjax.models.quant_config import QuantConfig
from fastjax.models.remat import POLICIES, RematPlan, parse_plan
from fastjax.plan import PlanConfig
from fastjax.train.config import TrainConfig
from fastjax.train.memory import savings
from fastjax.train.mesh import make_mesh
from fastjax.train.plan import report
from fastjax.train.plan.abstract import AbstractRun
from fastjax.train.plan.choose import choose_plan, usable
from fastjax.train.plan.costs import (
    Workload,
    adapter_width,
    host_bytes,
    kept_bytes,
    layer_costs,
    planned_bytes,
    recomputed_flop,
    step_flop,
)
from fastjax.train.plan.remembered import plan_file, recall, remember
from fastjax.train.plan.search import ladder, richest

LLAMA = ModelConfig.from_hf(preset("llama3-8b"))
WORK = Workload(seq=2048, num_tokens=8192)
GIB = 2**30


def test_bytes_of_a_layer_are_those_of_its_activations():
    costs = layer_costs(LLAMA, WORK)
    assert costs.num_bytes["gate_up"] == 2 * 14336 * 2
    assert costs.num_bytes["key"] == costs.num_bytes["value"] == 8 * 128 * 2
    assert costs.num_bytes["attn_lse"] == 32 * 4
    assert costs.kept_bytes(POLICIES["full"]) == 4096 * 2
    assert costs.kept_bytes(POLICIES["offload"]) == 0 and costs.host_bytes(POLICIES["offload"]) == 4096 * 2


def test_flop_of_a_step_are_those_of_its_matmuls_and_of_what_is_made_again():
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 128256
    assert step_flop(LLAMA, 1) == pytest.approx(4 * weights, rel=1e-4)
    assert recomputed_flop(parse_plan("none"), LLAMA, WORK) == 0
    assert recomputed_flop(parse_plan("no_matmul"), LLAMA, WORK) == 0
    # All but the down projection, whose output no backward reads.
    again = 32 * 2 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 4096 * 14336)
    assert recomputed_flop(parse_plan("full"), LLAMA, Workload(1, 1)) == pytest.approx(again, rel=1e-3)


def test_the_ladder_keeps_more_with_every_step():
    plans = ladder(LLAMA, WORK)
    kept = [kept_bytes(plan, LLAMA, WORK) for plan in plans]
    again = [recomputed_flop(plan, LLAMA, WORK) for plan in plans]
    assert kept == sorted(set(kept)) and np.all(np.diff(again) < 1)
    assert str(plans[0]) == "32*offload" and str(plans[-1]) == "unrolled,32*most"
    assert host_bytes(plans[0], LLAMA, WORK) == 32 * 8192 * 4096 * 2


def test_layers_are_unrolled_where_they_copy_much_and_long_rows_keep_attention_first():
    texts = [str(plan) for plan in ladder(LLAMA, WORK)]
    assert "unrolled,32*no_matmul" in texts and "unrolled,1*most,31*no_matmul" in texts and "32*no_matmul" not in texts
    for work in (replace(WORK, num_tokens=1024), replace(WORK, adapter_width=0)):
        assert str(ladder(LLAMA, work)[-1]) == "32*no_matmul"
    assert "32*full" in texts and not any("host:" in text for text in texts)
    long = [str(plan) for plan in ladder(LLAMA, replace(WORK, seq=32768, num_tokens=32768))]
    assert "32*attn_out+attn_lse+host:layer_in" in long and "32*full" not in long


@pytest.mark.parametrize("budget", [8, 9, 12, 16, 24, 32, 64])
def test_the_richest_plan_fits_and_the_next_does_not(budget):
    fixed = int(6.2 * GIB)
    plan = richest(LLAMA, WORK, budget=budget * GIB, fixed=fixed)
    plans = ladder(LLAMA, WORK)
    place = plans.index(plan)
    room = budget * GIB - fixed
    assert planned_bytes(plan, LLAMA, WORK) <= room
    assert place == len(plans) - 1 or planned_bytes(plans[place + 1], LLAMA, WORK) > room


def test_long_rows_take_whole_mlps_only_where_their_parts_are_kept():
    long = Workload(seq=65536, num_tokens=65536)
    in_pieces, whole = (parse_plan(text) for text in ("32*full", "1*no_matmul,31*full"))
    mlps = [planned_bytes(plan, LLAMA, long) - kept_bytes(plan, LLAMA, long) for plan in (in_pieces, whole)]
    assert mlps[1] == 8 * mlps[0] == 7 * 65536 * 14336 * 2


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
            temp_size_in_bytes=self.workspace + kept_bytes(plan, LLAMA, WORK),
            output_size_in_bytes=GIB,
            alias_size_in_bytes=GIB,
            host_temp_size_in_bytes=host_bytes(plan, LLAMA, WORK),
        )
        return SimpleNamespace(memory_analysis=lambda: report)


@pytest.mark.parametrize("budget", [8.5, 12, 16, 24, 40])
@pytest.mark.parametrize("workspace", [0.9, 2.1])
def test_the_choice_fits_and_fills_its_budget(budget, workspace):
    compiler = Compiler(int(workspace * GIB))
    choice = choose_plan(LLAMA, WORK, budget=int(budget * GIB), arguments=compiler.arguments, compile_step=compiler)
    assert choice.memory.peak <= budget * GIB
    best = ladder(LLAMA, WORK)[-1]
    left = budget * GIB - choice.memory.peak
    everything = kept_bytes(best, LLAMA, WORK)
    assert choice.plan == best or left < 0.05 * everything + 0.02 * budget * GIB
    assert compiler.count <= 3


def test_what_does_not_fit_says_by_how_much_and_what_would():
    compiler = Compiler(2 * GIB)
    with pytest.raises(DeviceMemoryError) as error:
        choose_plan(LLAMA, WORK, budget=7 * GIB, arguments=compiler.arguments, compile_step=compiler)
    assert "8,192 tokens needs 7.80 GiB, 0.91 more" in str(error.value)
    assert "per_device_train_batch_size=2" in str(error.value)
    assert "or max_seq_length=1024" in str(error.value)
    with pytest.raises(DeviceMemoryError, match="use more memory or a smaller model\nor hold the base in 4 bit"):
        choose_plan(
            LLAMA, WORK, budget=5 * GIB, arguments=compiler.arguments, compile_step=compiler,
            ways=savings(TrainConfig(method="lora")),
        )  # fmt: skip


def test_a_plan_found_before_is_taken_if_the_compiler_says_the_same_and_searched_anew_if_not():
    common = {"budget": 16 * GIB, "arguments": int(5.8 * GIB)}
    found = choose_plan(LLAMA, WORK, compile_step=Compiler(GIB), **common)
    for workspace, most in ((GIB, 1), (3 * GIB, 3)):
        compiler = Compiler(workspace)
        known = found.plan, found.memory.peak
        choice = choose_plan(LLAMA, WORK, compile_step=compiler, known=known, **common)
        assert choice.memory.peak <= usable(16 * GIB) and compiler.count <= most
        assert (choice.plan == found.plan) == (workspace == GIB)


def test_remembered_plans_are_read_back_and_damaged_ones_passed_over_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTJAX_CACHE", str(tmp_path))
    common = {"gpu": "H200", "arguments": 5}
    file = plan_file(LLAMA, WORK, budget=16 * GIB, **common)
    notes: list[str] = []
    assert recall(file, 32, notes.append) is None and notes == []
    plan = parse_plan("3*no_matmul,1*layer_in+attn_out+attn_lse,28*offload")
    remember(file, plan, 7 * GIB)
    assert recall(file, 32, notes.append) == (plan, 7 * GIB) and notes == []
    assert list(file.parent.iterdir()) == [file]
    assert (
        file != plan_file(LLAMA, WORK, budget=12 * GIB, **common) != plan_file(LLAMA, WORK, budget=12 * GIB, gpu="A100")
    )
    assert recall(file, 30, notes.append) is None
    for text in ("", "[1]", '{"plan": "no_matmul"}', '{"plan": "no_matmul", "peak": "x"}', '{"plan": 3, "peak": 1}'):
        file.write_text(text)
        assert recall(file, 32, notes.append) is None
    assert len(notes) == 6 and all("passed over" in note for note in notes)
    remember(tmp_path / "file" / "below.json", plan, 1)
    (tmp_path / "taken").write_text("")
    remember(tmp_path / "taken" / "below.json", plan, 1)


def run_of(lora):
    return AbstractRun.make(LLAMA, method="qlora", dtype=jnp.bfloat16, lora=lora, quantization=QuantConfig())


def test_adapters_count_by_their_own_ranks_and_targets():
    run = run_of(LoraConfig(r=40, lora_alpha=1, target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 8}))
    width = adapter_width(run.trainable)
    assert width == 64 + 16
    wide, narrow = (layer_costs(LLAMA, Workload(2048, 2048, adapter_width=w)).num_bytes["lora_xa"] for w in (width, 16))
    assert wide == 5 * narrow == 160
    assert layer_costs(LLAMA, Workload(2048, 2048, adapter_width=0)).num_bytes["lora_xa"] == 0


def test_the_plan_of_an_adapter_is_that_of_its_rank_and_targets(tmp_path):
    content = {
        "peft_type": "LORA",
        "r": 64,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "m",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    _, quantization, lora = report.model_of(
        PlanConfig(model="llama3-8b", gpu="H200", adapter=str(tmp_path)), frozenset()
    )
    assert quantization == QuantConfig() and adapter_width(run_of(lora).trainable) == 64


class Planner(report.Planner):
    """Compiles nothing: a token takes 100 KB beside 1 GiB, and twice that with remat=full."""

    def compile(self, plan, seq, rows):
        self.compiled[plan, seq, rows] = None
        temp = GIB + seq * rows * (200_000 if plan == parse_plan("full") else 100_000)
        memory = SimpleNamespace(
            argument_size_in_bytes=self.arguments, temp_size_in_bytes=temp, output_size_in_bytes=0,
            alias_size_in_bytes=0, host_temp_size_in_bytes=0,
        )  # fmt: skip
        return SimpleNamespace(memory_analysis=lambda: memory)


@pytest.mark.parametrize(("remat", "per_token"), [("auto", 100_000), ("full", 200_000)])
def test_the_longest_row_and_the_largest_batch_fill_the_memory_under_the_plan_that_is_asked_for(remat, per_token):
    config = PlanConfig(model="llama3-8b", gpu="RTX 4090", remat=remat, longest=True)
    planner = Planner(config, LLAMA, run_of(LoraConfig(r=16, lora_alpha=16)), make_mesh())
    found = planner.longest()
    room = usable(planner.budget) - planner.arguments - GIB
    assert 0.97 * room < found.longest_row * per_token <= room
    assert 0.94 * room < found.largest_batch * 2048 * per_token <= room
    assert found.fits and found.policy == ("offload" if remat == "auto" else remat)
    assert len(planner.compiled) <= 7
    assert found.budget == usable(planner.budget) and sum(found.parts.values()) == found.peak


def test_a_described_gpu_confirms_the_cost_model():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin is missing; `make test` installs it")
    common = {"model": "smollm2-135m", "gpu": "H200", "max_seq_length": 512, "gradient_accumulation_steps": 1}
    rich = report.make_report(PlanConfig(**common), frozenset())
    assert rich.fits and rich.policy == "30*no_matmul"
    lean = report.make_report(PlanConfig(**common, remat="full"), frozenset())
    # What one plan keeps more than the other is what its peak is higher by.
    saved = rich.parts["activations"] - lean.parts["activations"]
    assert np.isclose(rich.peak - lean.peak, saved, rtol=0.25)
    assert rich.step_time_s < lean.step_time_s
    assert sum(rich.parts.values()) == rich.peak
    assert jax.default_backend() == "cpu"
