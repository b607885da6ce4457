"""What the peers' benchmarks share: flags, random weights of a known shape, timing, and the line that is printed.

The flags and the line are those of `benchmarks.step`, so that the two can be laid side by side.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastjax.models.presets import preset


def arguments(description: str, checkpointing: tuple[str, ...]) -> argparse.Namespace:
    """The flags of a peer; `checkpointing` are its ways to recompute, the first the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--method", choices=("qlora", "lora"), default="qlora")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", choices=checkpointing, default=checkpointing[0])
    parser.add_argument("--layers", type=int, help="this many layers instead of the preset's")
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def random_checkpoint(options: argparse.Namespace, folder: str) -> str:
    """Writes a model of the preset's shapes with random weights for the peer to load; returns its folder."""
    import torch
    import transformers

    changes: dict[str, Any] = {"max_position_embeddings": max(options.seq, 8192)}
    if options.layers is not None:
        changes["num_hidden_layers"] = options.layers
    settings = dict(preset(options.preset)) | changes
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


def measure(options: argparse.Namespace, peer: str, load: Callable[[str], Any]) -> None:
    """Loads, warms up, times forward, backward and update of full rows, and prints one JSON line.

    Args:
      load: a model's folder -> the model with adapters, ready to train.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no CUDA device; run this on a machine with an NVIDIA GPU")
    with tempfile.TemporaryDirectory() as folder:
        model = load(random_checkpoint(options, str(Path(folder) / "model")))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (options.batch, options.seq)
    ids = torch.randint(0, model.config.vocab_size, shape, device="cuda", generator=generator)
    losses: list[float] = []

    def run(count: int) -> None:
        for _ in range(count):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))

    run(2)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run(options.steps)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / options.steps)
    result = {
        "peer": peer, "preset": options.preset, "method": options.method, "batch": options.batch, "seq": options.seq,
        "remat": options.checkpointing, "tokens_per_second": round(options.batch * options.seq / min(times), 1),
        "step_ms": round(min(times) * 1e3, 2), "spread_ms": round((max(times) - min(times)) * 1e3, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "losses": [round(loss, 4) for loss in losses],
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(result), flush=True)


def missing(package: str, install: str, error: ImportError) -> SystemExit:
    """What to raise where a peer is not installed."""
    return SystemExit(f"error: this measures {package}, which does not load here ({error}); {install}")
