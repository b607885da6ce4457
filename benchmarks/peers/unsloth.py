"""Unsloth's step on the shapes of `benchmarks.step`.

python -m benchmarks.peers.unsloth --preset llama3-8b --batch 4 --seq 2048 [--checkpointing unsloth|true|none]

Not run by us: the machines that this repository is measured on have no torch with CUDA. It uses Unsloth's public calls
alone, and needs unsloth with what it brings.
"""

from typing import Any

from benchmarks.peers.common import arguments, measure, missing

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_WAYS: dict[str, Any] = {"unsloth": "unsloth", "true": True, "none": False}


def main() -> None:
    options = arguments(__doc__, tuple(_WAYS))
    try:
        # Before transformers, which it changes.
        from unsloth import FastLanguageModel
    except (ImportError, NotImplementedError) as error:
        raise missing("Unsloth", "pip install unsloth, on a machine with an NVIDIA GPU", error) from None
    import torch

    def load(folder: str) -> Any:
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=options.seq, dtype=torch.bfloat16, load_in_4bit=options.method == "qlora"
        )
        model = FastLanguageModel.get_peft_model(
            model, r=options.rank, lora_alpha=options.rank, lora_dropout=0, bias="none", target_modules=_TARGETS,
            use_gradient_checkpointing=_WAYS[options.checkpointing], random_state=3407,
        )  # fmt: skip
        return model.train()

    measure(options, "unsloth", load)


if __name__ == "__main__":
    main()
