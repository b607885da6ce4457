"""The benchmark of a whole step, on the CPU: its plan, its packed rows, and its one line."""

import json
import sys

from benchmarks import step


def test_the_step_benchmark_plans_packs_and_prints_one_line(monkeypatch, capsys):
    command = (
        "step --preset smollm2-135m --layers 1 --batch 1 --seq 128 --packed alpaca --memory-budget-gib 1 --steps 1"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    step.main()
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["remat"] == "1*no_matmul" and 0 < result["compiled_gib"] < 1
    assert result["tokens_per_second"] > 0 and result["losses"][-1] < result["losses"][0]
