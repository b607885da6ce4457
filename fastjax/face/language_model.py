"""What FastLanguageModel hands out: a base model with its adapter, its tokenizer, and what can be done with them."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.face.python_words import in_python_words
from fastjax.face.refusals import GENERATE, MODEL_NAMES, missing, note, refuse

if TYPE_CHECKING:
    from fastjax.face.config_view import ConfigView, ModelOutput
    from fastjax.models.decoder import CausalLM
    from fastjax.models.lora import LoraConfig
    from fastjax.models.quant_config import QuantConfig
    from fastjax.train.parts import Base

_SAVE_METHODS = {"merged_16bit": "merged_16bit", "merged_32bit": "merged_32bit", "merged_4bit_forced": "merged_4bit"}
_NEW_TOKENS = 128


class LanguageModel:
    """A CausalLM with its adapter, if it has one.

    Attributes:
      model: the flax.nnx module.
      base: the opened checkpoint, its config and its tokenizer.
      lora: what the adapter was made from; None without an adapter.
      max_seq_length: longest row in tokens, for training.
      remat: what the backward pass recomputes, see `fastjax.models.remat`.
      seed: of the adapter's initial values; None for an adapter that was read from a folder.
      quantization: how its linear layers are quantised; None for a model in 16 or 32 bit.
      merged: whether an adapter was folded into the weights, so that they are no longer those of the checkpoint.
    """

    def __init__(
        self, model: "CausalLM", base: "Base", max_seq_length: int, quantization: "QuantConfig | None" = None
    ) -> None:
        self.model = model
        self.base = base
        self.max_seq_length = max_seq_length
        self.lora: LoraConfig | None = None
        self.quantization = quantization
        self.remat = "none"
        self.seed: int | None = None
        self.merged = False
        self._config: ConfigView | None = None

    def __repr__(self) -> str:
        adapter = "no adapter" if self.lora is None else f"LoRA of rank {self.lora.r}"
        config = self.model.config
        shape = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
        return (
            f"LanguageModel({self.base.checkpoint.name}: {config.model_type}, {shape}, {self.model.dtype}, {adapter})"
        )

    def num_parameters(self, only_trainable: bool = False) -> int:
        """The number of weights, adapters included, a 4-bit one being one; or only of those that training changes."""
        from flax import nnx

        from fastjax.models.layers import LoraParam, TrainedParam
        from fastjax.models.quantized import QuantizedParam, num_weights

        trained = only_trainable and self.lora is not None
        kinds = nnx.Any(LoraParam, TrainedParam) if trained else nnx.Any(nnx.Param, QuantizedParam)
        flat = nnx.to_flat_state(nnx.state(self.model, kinds))
        return sum(num_weights(variable.get_value()) for _, variable in flat)

    def print_trainable_parameters(self) -> None:
        """Print how many weights are trained, out of how many."""
        trainable, total = self.num_parameters(only_trainable=True), self.num_parameters()
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")

    @property
    def config(self) -> "ConfigView":
        """The model's config.json as attributes, and as `to_dict()`."""
        from fastjax.face.config_view import ConfigView

        if self._config is None:
            self._config = ConfigView(self.model.config.to_hf())
        return self._config

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> "ModelOutput":
        """The scores of the token after each one, without dropout.

        Args:
          input_ids: [T] or [B, T] token ids, or a tokenizer's mapping; attention_mask [B, T] says which are real.
        Returns: .logits [B, T, V] float32; those of padding mean nothing.
        """
        import jax.numpy as jnp
        from flax import nnx

        from fastjax.face.config_view import ModelOutput
        from fastjax.face.token_ids import read_token_ids

        ids, real = read_token_ids(input_ids, attention_mask)
        self._check_vocabulary(ids)
        positions = (real.cumsum(axis=1) - 1).clip(0)
        graphdef, state = nnx.split(self.model)
        return ModelOutput(_logits(graphdef, state, ids, jnp.asarray(positions, jnp.int32), real.astype("int32")))

    def __getattr__(self, name: str) -> Any:
        raise missing("the model", name, MODEL_NAMES)

    def merge_and_unload(self) -> "LanguageModel":
        """Fold the adapter into the weights, in memory, each rounded once to its own dtype.

        Returns: this model, now without an adapter.
        """
        from fastjax.models.merge import merge_lora

        if self.lora is None:
            raise UserError("the model has no adapter to merge; give it one with FastLanguageModel.get_peft_model")
        self.model = merge_lora(self.model)
        self.lora, self.merged, self.quantization, self._config = None, True, None, None
        return self

    def generate(
        self,
        prompts: Any = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        streamer: Any = None,
        token_type_ids: Any = None,
        **arguments: Any,
    ) -> Any:
        """Answers to prompts, or the tokens that follow given tokens.

        `max_seq_length` is no bound here, only the model's own limit and max_length are.

        Args:
          prompts: a string, a list of messages, or a list of either; a string is one user message where the tokenizer
            has a chat template, and text to continue where it has none. Or token ids, as input_ids.
          input_ids: [T] or [B, T] token ids, as lists, numpy's, jax's or torch's arrays, or the mapping that a
            tokenizer returns; padded on either side: attention_mask [B, T] says which are real.
          max_new_tokens: longest answer in tokens; 128 if max_length is not given either.
          max_length: the same with the prompt (of a batch the longest one, padding included) counted.
          do_sample: False is greedy, True draws with temperature 1.0 if none is given; None follows temperature.
          temperature: 0 or None takes the most likely token.
          top_k, top_p, min_p: what to draw from, see `fastjax.models.sampling`.
          eos_token_id: one or several tokens that end an answer; None means the model's and the tokenizer's.
          pad_token_id: what fills the rows that end early; None means the tokenizer's.
          streamer: of one row; its put() gets the prompt [1, T] and then each new token [1], its end() nothing. All
            come when the answer is whole.
          token_type_ids: these models have no use for them.
        Returns: the answer of one prompt, the answers of a list; for ids [B, T + N] int32, each row its input followed
          by its new tokens and the pad token.
        Raises: UserError for an argument that cannot be honoured.
        """
        refuse("generate", GENERATE, arguments, ("max_new_tokens", "max_length", "temperature", "eos_token_id"))
        temperature = _temperature(do_sample, temperature, {"top_k": top_k, "top_p": top_p, "min_p": min_p})
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
        }
        if (prompts is None) == (input_ids is None):
            raise UserError("generate takes either prompts or input_ids; give one of the two")
        from fastjax.face.token_ids import is_token_ids, read_token_ids
        from fastjax.models.generation import generate
        from fastjax.train.parts import eos_token_ids, prompt_rows

        ends = eos_token_ids(self.base) if eos_token_id is None else _several(eos_token_id)
        given = input_ids if prompts is None else prompts
        as_ids = prompts is None or is_token_ids(prompts)
        single = False
        if as_ids:
            ids, real = read_token_ids(given, attention_mask)
            rows, width = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)], ids.shape[1]
        else:
            single = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], Mapping))
            rows = prompt_rows(self.base, [given] if single else list(given))
            width = max(map(len, rows), default=0)
        if streamer is not None and len(rows) != 1:
            raise UserError(f"streamer with {len(rows)} prompts; it shows one answer, give one prompt")
        num_new = _num_new(max_new_tokens, max_length, width)
        with in_python_words():
            new = generate(self.model, rows, max_new_tokens=num_new, eos_token_ids=ends, **sampling)
        if streamer is not None:
            _stream(streamer, ids if as_ids else rows, new[0])
        if not as_ids:
            answers = [str(self.base.tokenizer.decode(row, skip_special_tokens=True)) for row in new]
            return answers[0] if single else answers
        pad = self.base.tokenizer.pad_token_id if pad_token_id is None else pad_token_id
        return _joined(ids, new, (ends[0] if ends else 0) if pad is None else pad)

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
        if save_method == "merged_4bit":
            raise UserError(
                "save_method='merged_4bit' would round the merged weights to 4 bit again and lose small updates; use "
                "merged_16bit, or merged_4bit_forced if that is what you want"
            )
        if save_method not in _SAVE_METHODS:
            raise UserError(f"save_method={save_method!r} is unknown; use one of {', '.join(_SAVE_METHODS)}, lora")
        tokenizer = tokenizer or self.base.tokenizer
        with in_python_words():
            check_export_folder(Path(folder), False, [self.base.checkpoint.name])
            write_merged(self.model, self.base.checkpoint, tokenizer, folder, _SAVE_METHODS[save_method])

    def _check_vocabulary(self, ids: Any) -> None:
        size = self.model.config.vocab_size
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise UserError(f"input_ids has the token id {wrong}, outside the model's vocabulary of {size}")


@functools.cache
def _compiled_logits() -> Any:
    import jax
    from flax import nnx

    def logits(graphdef: Any, state: Any, ids: Any, positions: Any, segment_ids: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return model(ids, positions=positions, segment_ids=segment_ids)

    return jax.jit(logits, static_argnums=0)


def _logits(*arguments: Any) -> Any:
    return _compiled_logits()(*arguments)


def _temperature(do_sample: bool | None, temperature: float | None, filters: Mapping[str, float | None]) -> float:
    # 1.0 is what transformers has where nothing is said: it goes with both.
    if do_sample is False and temperature not in (None, 0, 1):
        raise UserError(f"temperature={temperature} with do_sample=False, which takes the most likely token; drop one")
    if do_sample and temperature == 0:
        raise UserError("do_sample=True with temperature=0, which takes the most likely token; drop one")
    if do_sample is False or (do_sample is None and not temperature):
        idle = [f"{name}={value}" for name, value in filters.items() if value is not None]
        if idle and do_sample is None:
            note(f"the most likely token is taken, so {', '.join(idle)} filters nothing; say do_sample=True to draw")
        return 0.0
    return 1.0 if temperature is None else temperature


def _num_new(max_new_tokens: int | None, max_length: int | None, width: int) -> int:
    """transformers' meaning of the two: max_new_tokens wins."""
    if max_new_tokens is not None:
        return max_new_tokens
    if max_length is None:
        return _NEW_TOKENS
    if max_length <= width:
        raise UserError(
            f"max_length={max_length} leaves no room for an answer to a prompt of {width} tokens; raise it, or say "
            "max_new_tokens, which counts the answer alone"
        )
    return max_length - width


def _several(eos_token_id: int | Sequence[int]) -> tuple[int, ...]:
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)


def _stream(streamer: Any, prompt: Any, new: list[int]) -> None:
    import numpy as np

    streamer.put(np.asarray(prompt, np.int32))
    for token in new:
        streamer.put(np.array([token], np.int32))
    streamer.end()


def _joined(ids: Any, new: list[list[int]], pad: int) -> Any:
    """[B, T + N] int32: each row and what follows it."""
    import numpy as np

    longest = max(map(len, new), default=0)
    tail = np.full((len(new), longest), pad, np.int32)
    for row, tokens in enumerate(new):
        tail[row, : len(tokens)] = tokens
    return np.concatenate([ids, tail], axis=1)
