"""The step of transformers + PEFT + bitsandbytes on the shapes of `benchmarks.step`.

python -m benchmarks.peers.hf --preset llama3-8b --batch 4 --seq 2048

Not run by us: the machines that this repository is measured on have no torch with CUDA. It uses the public calls of
the three libraries alone; needs torch, transformers, peft and, for qlora, bitsandbytes.
"""

from typing import Any

from benchmarks.peers.common import arguments, measure, missing

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    options = arguments(__doc__, ("full", "none"))
    try:
        import peft
        import torch
        import transformers

        if options.method == "qlora":
            import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise missing("transformers", "pip install torch transformers peft bitsandbytes", error) from None

    def load(folder: str) -> Any:
        settings: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": 0}, "attn_implementation": "sdpa"}
        if options.method == "qlora":
            settings["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)
        recompute = options.checkpointing == "full"
        if options.method == "qlora":
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=recompute)
        elif recompute:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        lora = peft.LoraConfig(
            r=options.rank, lora_alpha=options.rank, target_modules=_TARGETS, task_type="CAUSAL_LM"
        )  # fmt: skip
        model = peft.get_peft_model(model, lora)
        model.config.use_cache = False
        return model.train()

    measure(options, "transformers", load)


if __name__ == "__main__":
    main()
