"""Does a QLoRA run with every fast path follow the plain one? The losses of both, step by step, on this machine's GPU.

python -m benchmarks.follow --steps 200 --model smollm2.gguf --rows rows.npz
python -m benchmarks.follow --steps 200

The plain run takes the reference of every op and keeps all activations; the fast one takes what the models take by
default, and --remat. Both start from the same 4-bit weights and adapters and see the same rows. The last line is JSON:
the largest relative difference of the loss averaged over 10 steps, which should stay below 0.005.

--model is a folder or a .gguf file (its pieces in order, if it came in several; reading it needs the gguf package);
without it the preset smollm2-135m with random weights. --rows is a file that `--write-rows` makes from a .jsonl file
where transformers is installed; without it rows of random walks over 64 tokens, which can be learnt.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.random_model import random_model
from fastjax.kernels._dispatch import prefer
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, apply_lora, split_trainable
from fastjax.models.quant_config import QuantConfig
from fastjax.train.mesh import batch_sharding, make_mesh, replicated
from fastjax.train.optim import make_optimizer
from fastjax.train.step import make_train_step

_WINDOW, _MOST = 10, 0.005


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="folder or .gguf file, in one or several pieces")
    parser.add_argument("--rows", help="file of --write-rows")
    parser.add_argument(
        "--write-rows", help="tokenise this .jsonl file with the model's tokenizer into --rows, and stop"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--remat", default="full", help="of the fast run")
    parser.add_argument("--layers", type=int, help="this many layers of the preset")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.write_rows:
        write_rows(options)
        return
    model = load(options)
    apply_lora(model, LoraConfig(r=options.rank, lora_alpha=options.rank), jax.random.key(0))
    graphdef, trainable, frozen = split_trainable(model, "qlora")
    batches = rows_of(options, model.config.vocab_size)
    plain = run(options, graphdef, trainable, frozen, batches, "none", ("reference", "separate", "xla"))
    fast = run(options, graphdef, trainable, frozen, batches, options.remat, ())
    windows = [np.convolve(losses, np.ones(_WINDOW) / _WINDOW, "valid") for losses in (plain, fast)]
    apart = np.abs(windows[1] / windows[0] - 1)
    for step in range(0, len(plain), max(1, len(plain) // 20)):
        print(f"step {step + 1:4d}  plain {plain[step]:.5f}  fast {fast[step]:.5f}", flush=True)
    result = {
        "steps": options.steps, "first": round(plain[0], 4), "last_plain": round(plain[-1], 4),
        "last_fast": round(fast[-1], 4), "largest_difference": round(float(apart.max()), 6),
        "largest_of_one_step": round(float(np.max(np.abs(np.divide(fast, plain) - 1))), 6),
        "follows": bool(apart.max() < _MOST), "device": jax.devices()[0].device_kind, "jax": jax.__version__,
    }  # fmt: skip
    print(json.dumps(result), flush=True)


def load(options: argparse.Namespace) -> CausalLM:
    """The 4-bit model, bfloat16 beside it."""
    if not options.model:
        changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
        return random_model("smollm2-135m", QuantConfig(), **changes)
    from fastjax.models.checkpoint.load import load_model

    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.model[0])
        if len(options.model) > 1:
            path = Path(folder) / "joined.gguf"
            with path.open("wb") as whole:
                for piece in options.model:
                    whole.write(Path(piece).read_bytes())
        return load_model(str(path), jnp.bfloat16, quantization=QuantConfig())


def run(
    options: argparse.Namespace, graphdef: Any, trainable: Any, frozen: Any, batches: list[dict[str, np.ndarray]],
    remat: str, preferred: tuple[str, ...],
) -> list[float]:  # fmt: skip
    """The loss of every step."""
    mesh = make_mesh(1)
    optimizer = make_optimizer(optax.constant_schedule(options.learning_rate))
    # A copy: the step takes its arguments' place.
    trainable = jax.device_put(jax.tree.map(jnp.copy, trainable), replicated(mesh))
    frozen = jax.device_put(frozen, replicated(mesh))
    opt_state = jax.jit(optimizer.init)(trainable)
    step = make_train_step(graphdef, optimizer, mesh=mesh, remat=remat)
    losses = []
    with prefer(*preferred):
        for index in range(options.steps):
            batch = jax.device_put(batches[index % len(batches)], batch_sharding(mesh))
            trainable, opt_state, metrics = step(trainable, opt_state, frozen, batch, jax.random.key(0))
            losses.append(metrics["loss_sum"] / metrics["num_target_tokens"])
    return [float(loss) for loss in losses]


def rows_of(options: argparse.Namespace, vocab_size: int) -> list[dict[str, np.ndarray]]:
    """[1, B, T] batches, one a step."""
    shape = (options.steps, 1, options.batch, options.seq)
    if options.rows:
        with np.load(options.rows) as file:
            ids, lengths, starts = file["ids"], file["lengths"], file["starts"]
        order = np.random.default_rng(0).permutation(len(ids))
        chosen = np.resize(order, options.steps * options.batch)
        ids = ids[chosen, : options.seq].reshape(shape)
        place = np.arange(options.seq)
        segments = (place < lengths[chosen, None]).reshape(shape).astype(np.int32)
        targets = ((place >= starts[chosen, None]) & (place < lengths[chosen, None])).reshape(shape)
    else:
        rng = np.random.default_rng(0)
        walk = np.cumsum(rng.choice([1, 1, 1, 2, 5], shape), axis=-1) % 64
        ids = (walk * (vocab_size // 64)).astype(np.int32)
        segments, targets = np.ones(shape, np.int32), np.ones(shape, bool)
    arrays = {"input_ids": ids.astype(np.int32), "segment_ids": segments, "loss_mask": targets}
    return [{name: array[index] for name, array in arrays.items()} for index in range(options.steps)]


def write_rows(options: argparse.Namespace) -> None:
    """Tokenises prompt and completion, or question and answer, of each line; needs transformers."""
    from fastjax.models.checkpoint.source import open_checkpoint
    from fastjax.models.checkpoint.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(open_checkpoint(options.model[0]))
    ids, lengths, starts = [], [], []
    for line in Path(options.write_rows).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        asked = tokenizer.encode(row.get("prompt") or row["question"])
        whole = (asked + tokenizer.encode("\n" + (row.get("completion") or row["answer"])))[: options.seq]
        ids.append(np.pad(np.array(whole, np.int32), (0, options.seq - len(whole))))
        lengths.append(len(whole))
        starts.append(min(len(asked), len(whole) - 1))
    np.savez_compressed(options.rows, ids=np.stack(ids), lengths=np.array(lengths), starts=np.array(starts))
    print(f"{len(ids)} rows in {options.rows}")


if __name__ == "__main__":
    main()
