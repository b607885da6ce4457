"""What a run that is out of device memory can do about it."""

import textwrap

from fastjax.train.config import TrainConfig


def out_of_memory(error: BaseException, config: TrainConfig) -> str:
    """XLA's complaint in a line, and under it the settings of this run that would take less, the cheapest first."""
    first = textwrap.shorten(str(error).strip().splitlines()[0], 200)
    return f"out of device memory: {first}\n{'; '.join(remedies(config))}"


def remedies(config: TrainConfig) -> list[str]:
    """Changes of the settings that take less device memory, those first that change neither speed nor result much."""
    found = []
    if config.remat not in ("full", "offload"):
        found.append(f"use --remat full or offload (it is {config.remat})")
    rows, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if rows > 1:
        # The same rows a step, in as many more micro-batches: the loss of a step is the same.
        divisor = next(size for size in range(2, rows + 1) if rows % size == 0)
        found.append(
            f"use --per_device_train_batch_size {rows // divisor} "
            f"--gradient_accumulation_steps {accumulation * divisor}, which is the same step"
        )
    if config.method == "full":
        found.append("train adapters: --method qlora or lora")
    elif config.method == "lora":
        found.append("hold the base in 4 bit: --method qlora")
    if config.optim == "adamw":
        found.append("keep the optimiser's moments in 8 bit: --optim adamw_8bit")
    found.append(f"make --max_seq_length smaller (it is {config.max_seq_length})")
    found.append("see what each takes beforehand with python -m fastjax.plan")
    return found
