"""Every command in a process of its own: its help from anywhere, and never torch in it, with torch installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ("train", "generate", "evaluate", "export")

# Runs a module as `python -m` does, and tells on stderr what of torch it left in the process.
WRAPPER = """
import runpy, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code or 0
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "tensorflow"))
print("LOADED", loaded[:3], file=sys.stderr)
sys.exit(code)
"""


def run(*words: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A Python process with these arguments; the package is found as it is installed, or from the root."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def run_watched(command: str, *flags: str | Path) -> str:
    """What the command prints; fails unless it ended well and without torch."""
    done = run("-c", WRAPPER, f"fastjax.{command}", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.rstrip().endswith("LOADED []"), done.stderr[-500:]
    return done.stdout


def test_torch_is_installed_or_the_tests_below_prove_nothing() -> None:
    assert find_spec("torch") is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_help_from_the_root(command: str) -> None:
    done = run("-m", f"fastjax.{command}", "--help")
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout


def test_help_from_elsewhere(tmp_path: Path) -> None:
    if run("-c", "import fastjax", folder=tmp_path).returncode:
        pytest.skip("fastjax is not installed, only present")
    done = run("-m", "fastjax.train", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--learning_rate" in done.stdout
    assert run("-m", "fastjax", "--help", folder=tmp_path).returncode == 0


def test_a_whole_job_never_has_torch(model_folder: Path, rows_file: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    run_watched(
        "train", "--model", model_folder, "--data", rows_file, "--eval_data", rows_file, "--output_dir", run_folder,
        "--max_steps", "2", "--lora_r", "2", "--dtype", "float32", "--max_seq_length", "64", "--sample_prompt", "red",
    )  # fmt: skip
    adapter = run_folder / "adapter"
    same = ("--model", model_folder, "--adapter", adapter)
    assert "eval_loss=" in run_watched("evaluate", *same, "--data", rows_file, "--dtype", "float32")
    run_watched("generate", *same, "--prompt", "red", "--max_new_tokens", "4")
    run_watched("export", *same, "--output_dir", tmp_path / "merged")
    assert (tmp_path / "merged" / "config.json").is_file()
    assert (run_folder / "loss.png").is_file() and list((run_folder / "tensorboard").iterdir())
