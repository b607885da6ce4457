"""What FastLanguageModel hands out: a base model with its adapter, its tokenizer, and what can be done with them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.refusals import GENERATE, refuse

if TYPE_CHECKING:
    from fastjax.models.decoder import CausalLM
    from fastjax.models.lora import LoraConfig
    from fastjax.train.parts import Base

Prompt = str | Sequence[Mapping[str, Any]]
_SAVE_METHODS = ("merged_16bit", "merged_32bit")


class LanguageModel:
    """A CausalLM with its adapter, if it has one.

    Attributes:
      model: the flax.nnx module.
      base: the opened checkpoint, its config and its tokenizer.
      lora: what the adapter was made from; None without an adapter.
      max_seq_length: longest row in tokens, for training and generation.
      remat: what the backward pass recomputes, see `fastjax.models.remat`.
      seed: of the adapter's initial values.
    """

    def __init__(self, model: "CausalLM", base: "Base", max_seq_length: int) -> None:
        self.model = model
        self.base = base
        self.max_seq_length = max_seq_length
        self.lora: LoraConfig | None = None
        self.remat = "none"
        self.seed = 3407

    def __repr__(self) -> str:
        adapter = "no adapter" if self.lora is None else f"LoRA of rank {self.lora.r}"
        config = self.model.config
        shape = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
        return (
            f"LanguageModel({self.base.checkpoint.name}: {config.model_type}, {shape}, {self.model.dtype}, {adapter})"
        )

    def num_parameters(self, only_trainable: bool = False) -> int:
        """The number of weights, adapters included; or only of those that training with the adapter changes."""
        import jax
        from flax import nnx

        from fastjax.models.layers import LoraParam, TrainedParam

        kinds = nnx.Any(LoraParam, TrainedParam) if only_trainable and self.lora is not None else nnx.Param
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model, kinds)))

    def print_trainable_parameters(self) -> None:
        """Print how many weights are trained, out of how many."""
        trainable, total = self.num_parameters(only_trainable=True), self.num_parameters()
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        max_new_tokens: int = 128,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        **arguments: Any,
    ) -> Any:
        """Answers to prompts, or the tokens that follow given tokens.

        Args:
          prompts: a string, a list of messages, or a list of either; a string is one user message where the tokenizer
            has a chat template, and text to continue where it has none.
          input_ids: instead of prompts, [B, T] token ids as a tokenizer returns them, padded on either side;
            attention_mask [B, T] says which are real.
          do_sample: False is greedy, True draws with temperature 1.0 if none is given; None follows temperature.
          temperature: 0 or None takes the most likely token.
        Returns: the answer of one prompt, the answers of a list; for input_ids [B, T + N] int32, each row its input
          followed by its new tokens and the pad token.
        Raises: UserError for an argument that cannot be honoured.
        """
        refuse("generate", GENERATE, arguments)
        sampling = {"temperature": _temperature(do_sample, temperature), "top_k": top_k, "top_p": top_p, "seed": seed}
        if (prompts is None) == (input_ids is None):
            raise UserError("generate takes either prompts or input_ids; give one of the two")
        if input_ids is not None:
            return self._continue_ids(input_ids, attention_mask, max_new_tokens, sampling)
        assert prompts is not None
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))
        texts: list[Any] = [prompts] if single else list(prompts)
        answers = self._answer(texts, max_new_tokens, sampling)
        return answers[0] if single else answers

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write the adapter as PEFT reads it, with the tokenizer; or the whole model where there is no adapter."""
        from fastjax.models.checkpoint.save import save_model
        from fastjax.models.checkpoint.tokenizer import save_tokenizer
        from fastjax.models.peft_io import save_adapter

        tokenizer = tokenizer or self.base.tokenizer
        if self.lora is None:
            generation_config = self.base.checkpoint.generation_config
            save_model(self.model, folder, tokenizer=tokenizer, generation_config=generation_config)
            return
        save_adapter(self.model, self.lora, folder, self.base.checkpoint.name)
        save_tokenizer(tokenizer, folder)

    def save_pretrained_merged(
        self, folder: str | Path, tokenizer: Any = None, save_method: str = "merged_16bit"
    ) -> None:
        """Write a Hugging Face folder with the adapter merged in; the model in memory keeps its adapter.

        Raises: UserError for another save_method, or a folder that is not empty.
        """
        from fastjax.export import check_export_folder, write_merged

        if save_method == "lora":
            self.save_pretrained(folder, tokenizer)
            return
        if save_method not in _SAVE_METHODS:
            raise UserError(
                f"save_method={save_method!r} is not in this release; use one of {', '.join(_SAVE_METHODS)}, lora"
            )
        check_export_folder(Path(folder), False, [self.base.checkpoint.name])
        tokenizer = tokenizer or self.base.tokenizer
        write_merged(self.model, self.base.checkpoint, tokenizer, folder, save_method, keep=True)

    def _answer(self, prompts: list[Prompt], max_new_tokens: int, sampling: Mapping[str, Any]) -> list[str]:
        from fastjax.train.parts import answer

        return answer(self.model, self.base, prompts, max_new_tokens=max_new_tokens, **sampling)

    def _continue_ids(self, input_ids: Any, mask: Any, max_new_tokens: int, sampling: Mapping[str, Any]) -> Any:
        import numpy as np

        from fastjax.models.generation import generate
        from fastjax.train.parts import eos_token_ids

        ids = np.atleast_2d(np.asarray(input_ids)).astype(np.int32)
        real = np.ones(ids.shape, bool) if mask is None else np.atleast_2d(np.asarray(mask)).astype(bool)
        if real.shape != ids.shape:
            raise UserError(f"attention_mask has shape {real.shape}, input_ids {ids.shape}; they must be equal")
        ends = eos_token_ids(self.base)
        new = generate(
            self.model, [row[keep].tolist() for row, keep in zip(ids, real, strict=True)],
            max_new_tokens=max_new_tokens, eos_token_ids=ends, **sampling,
        )  # fmt: skip
        pad = self.base.tokenizer.pad_token_id
        pad = (ends[0] if ends else 0) if pad is None else pad
        longest = max(map(len, new))
        tail = np.array([[*row, *[pad] * (longest - len(row))] for row in new], np.int32)
        return np.concatenate([ids, tail], axis=1)


def _temperature(do_sample: bool | None, temperature: float | None) -> float:
    if do_sample is False and temperature:
        raise UserError(f"temperature={temperature} with do_sample=False, which takes the most likely token; drop one")
    if do_sample and temperature == 0:
        raise UserError("do_sample=True with temperature=0, which takes the most likely token; drop one")
    if temperature is None:
        return 1.0 if do_sample else 0.0
    return temperature
