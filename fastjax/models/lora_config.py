"""What an adapter consists of: PEFT's settings, and which modules of a model they choose.

Modules are spoken of by HF's full names (`model.layers.0.self_attn.q_proj`), because that is what PEFT matches against.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from fastjax.errors import UserError
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import Linear, Lora
from fastjax.models.values import number, shown, whole

ALL_LINEAR = "all-linear"
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"

Path = tuple[str, ...]

_MOST_ALPHA = 1e9  # far above any in use; keeps alpha / r finite in float32


@dataclass(frozen=True)
class LoraConfig:
    """PEFT's LoraConfig: the same names with the same meaning, as far as we have them.

    Lists may be given as any sequence and are kept as tuples.

    Attributes:
      r: rank of the update B A.
      lora_alpha: the update is scaled by lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
      lora_dropout: probability that an input element of an adapter is dropped in training, in [0, 1).
      target_modules: a list of full names (`model.layers.0.mlp.up_proj`) or their trailing parts (`up_proj`,
        `mlp.up_proj`); or a regular expression that has to match a full name wholly; or "all-linear", every linear
        layer but the head. (PEFT's own default depends on the model.)
      exclude_modules: names or a regular expression, as above; these get no adapter.
      layers_to_transform: numbers of the layers that get adapters; names listed in full are not filtered.
      layers_pattern: what the list of layers is called, where a name holds several numbers.
      rank_pattern, alpha_pattern: r and lora_alpha of some modules; a key is a regular expression for a trailing part
        of the name, the first that matches counts.
      modules_to_save: modules trained in full beside the adapters: `embed_tokens`, `lm_head`.
      ensure_weight_tying: whether a tied embedding stays tied when modules_to_save names it.
      bias: "none"; biases are not trained.
      init_lora_weights: True: A as torch's Linear, B zero. "gaussian": A normal with deviation 1 / r, B zero.
        False: both as torch's Linear, so that the adapter changes the model from the start.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: Sequence[str] | str = ALL_LINEAR
    exclude_modules: Sequence[str] | str | None = None
    layers_to_transform: Sequence[int] | int | None = None
    layers_pattern: Sequence[str] | str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: Sequence[str] | None = None
    ensure_weight_tying: bool = False
    bias: str = "none"
    init_lora_weights: bool | str = True

    def __post_init__(self) -> None:
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        layers = self.layers_to_transform
        layers = () if layers is None else (layers,) if isinstance(layers, int) else tuple(layers)
        object.__setattr__(self, "layers_to_transform", layers or None)
        object.__setattr__(self, "rank_pattern", dict(self.rank_pattern or {}))
        object.__setattr__(self, "alpha_pattern", dict(self.alpha_pattern or {}))
        self._check()

    def _check(self) -> None:
        for name, rank in {"r": self.r, **{f"rank_pattern[{k!r}]": v for k, v in self.rank_pattern.items()}}.items():
            whole(rank, name)
        alphas = {"lora_alpha": self.lora_alpha, **{f"alpha_pattern[{k!r}]": v for k, v in self.alpha_pattern.items()}}
        for name, alpha in alphas.items():
            number(alpha, name, -_MOST_ALPHA, _MOST_ALPHA)
        if isinstance(self.modules_to_save, str):
            raise UserError(f"modules_to_save={self.modules_to_save!r} must be a list of names")
        dropout = self.lora_dropout
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise UserError(f"lora_dropout={shown(self.lora_dropout)} must be at least 0 and below 1")
        for layer in self.layers_to_transform or ():  # type: ignore[union-attr]
            whole(layer, "layers_to_transform", least=0)
        if self.bias != "none":
            raise UserError(f"bias={self.bias!r}: biases are not trained beside adapters; use bias='none'")
        if self.init_lora_weights not in (True, False, "gaussian"):
            raise UserError(
                f"init_lora_weights={self.init_lora_weights!r} is not supported; use True, 'gaussian' or False"
            )
        if isinstance(self.target_modules, str) and (self.layers_to_transform or self.layers_pattern):
            raise UserError(
                f"layers_to_transform and layers_pattern go with a list of target_modules, not with the string "
                f"{self.target_modules!r}; list the modules, or choose the layers in the regular expression"
            )
        if self.layers_pattern and not self.layers_to_transform:
            raise UserError(f"layers_pattern={self.layers_pattern!r} needs layers_to_transform")
        if not self.target_modules:
            raise UserError("target_modules is empty; list module names, or use 'all-linear'")
        # Each as it will be matched: a group that is open, or flags, may be sound alone and not in there.
        named = (self.target_modules, self.exclude_modules)
        expressions = {text: text for text in named if isinstance(text, str)}
        expressions |= {key: _key_expression(key) for key in (*self.rank_pattern, *self.alpha_pattern)}
        expressions |= {pattern: _layer_expression(pattern) for pattern in _listed(self.layers_pattern)}
        for given, expression in expressions.items():
            try:
                re.compile(expression)
            except (re.error, OverflowError, RecursionError) as error:
                raise UserError(f"{shown(given)} is not a regular expression: {error}") from error


@dataclass(frozen=True)
class Target:
    """A linear module that gets an adapter: its HF name, the path of its (stacked) module, its layer, rank, scale."""

    name: str
    path: Path
    layer: int | None
    rank: int
    scale: float


@dataclass(frozen=True)
class AdapterPlan:
    """Everything a LoraConfig adds to one model: adapters, fully trained modules (full names), and whether the head
    stays tied to the embedding."""

    targets: tuple[Target, ...]
    trained: tuple[str, ...]
    keep_tied: bool

    def by_path(self) -> dict[Path, list[Target]]:
        """Targets of each stacked module, in the order of their layers."""
        out: dict[Path, list[Target]] = {}
        for target in self.targets:
            out.setdefault(target.path, []).append(target)
        return out


@dataclass(frozen=True)
class _Place:
    path: Path
    layer: int | None
    linear: bool


def plan_adapter(config: LoraConfig, model: CausalLM, *, strict: bool = True) -> AdapterPlan:
    """Which modules of `model` get what.

    Args:
      strict: whether each single name, layer number and pattern key has to be of use. Adapters on disk often list names
        of other architectures too, so they are read with False, as PEFT does.
    Raises: UserError if nothing is chosen, or something that can have no adapter; it names what there is.
    Source: PEFT 0.21, `check_target_module_exists`, `get_pattern_key`, `_set_trainable`.
    """
    places = _places(model)
    trained = _trained(config, places)
    if HEAD in trained and model.lm_head is not None and model.lm_head.is_quantized:
        raise UserError(
            "modules_to_save: lm_head is 4-bit, and 4-bit weights cannot be trained; name it in target_modules, or "
            "quantise the 16-bit model without it"
        )
    matched: list[str] = []
    useful: set[str] = set()
    for name in places:
        if _excluded(config, name):
            continue
        reasons = _reasons(config, name, places)
        if reasons:
            matched.append(name)
            useful |= reasons
    unfit = [name for name in matched if not places[name].linear]
    if unfit:
        raise UserError(_unfit_message(config, unfit[0]))
    unused = [] if isinstance(config.target_modules, str) else [n for n in config.target_modules if n not in useful]
    if not matched or (strict and unused):
        raise UserError(_nothing_message(config, unused, places))
    targets = tuple(_target(config, name, places[name]) for name in matched)
    if strict:
        _check_patterns(config, targets, places)
    keep_tied = config.ensure_weight_tying and model.lm_head is None
    if keep_tied and HEAD in matched:
        raise UserError(
            "ensure_weight_tying with an adapter on lm_head would adapt the embedding too, which is not supported; "
            "leave lm_head out of target_modules, or set ensure_weight_tying to false"
        )
    return AdapterPlan(targets, trained, keep_tied)


def _names(setting: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value or None
    # A set has no order of its own, and what is written to disk must not depend on hashing.
    names = tuple(sorted(value) if isinstance(value, set | frozenset) else value)
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"{setting}={list(names)!r} must hold names only")
    return names or None


def _places(model: CausalLM) -> dict[str, _Place]:
    """Every module of the model by its HF name, containers included: PEFT's expressions see those too."""
    num_layers = model.config.num_hidden_layers
    shared: dict[str, _Place] = {"model": _Place((), None, False)}
    stacked: dict[str, _Place] = {}
    head = _Place((HEAD,), None, True)
    for path, module in nnx.iter_modules(model):
        names = tuple(str(part) for part in path)
        if isinstance(module, Lora) or "lora" in names or not names or names[0] == HEAD:
            continue
        if names[0] == "layers":
            stacked[".".join(names[1:])] = _Place(names, None, isinstance(module, Linear))
        else:
            shared[f"model.{'.'.join(names)}"] = _Place(names, None, isinstance(module, Linear))
    # Modules without weights, which our tree does not have.
    shared |= {"model.layers": _Place((), None, False), "model.rotary_emb": _Place((), None, False)}
    stacked["mlp.act_fn"] = _Place((), None, False)
    places = dict(shared)
    for layer in range(num_layers):
        for tail, place in sorted(stacked.items()):
            name = f"model.layers.{layer}" + (f".{tail}" if tail else "")
            places[name] = _Place(place.path, layer, place.linear)
    return {**places, HEAD: head}


def _excluded(config: LoraConfig, name: str) -> bool:
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in config.modules_to_save or ()):
        return True
    if isinstance(config.exclude_modules, str):
        return re.fullmatch(config.exclude_modules, name) is not None
    return any(_ends(name, excluded) for excluded in config.exclude_modules or ())


def _reasons(config: LoraConfig, name: str, places: Mapping[str, _Place]) -> set[str]:
    """The entries of target_modules that choose the module."""
    wanted = config.target_modules
    if isinstance(wanted, str):
        if wanted.lower() == ALL_LINEAR:
            return {wanted} if places[name].linear and name != HEAD else set()
        return {wanted} if re.fullmatch(wanted, name) else set()
    by_tail = {entry for entry in wanted if entry != name and _ends(name, entry)}
    if by_tail and config.layers_to_transform is not None and _layer_index(config, name) is None:
        by_tail = set()
    return by_tail | ({name} & set(wanted))


def _layer_index(config: LoraConfig, name: str) -> int | None:
    """The module's layer number if it is one of layers_to_transform."""
    layers, patterns = config.layers_to_transform, config.layers_pattern
    assert isinstance(layers, tuple)
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(?P<layer>\d+)\.", name)
    else:
        found = next((m for p in _listed(patterns) if (m := re.match(_layer_expression(p), name))), None)
    return int(found["layer"]) if found and int(found["layer"]) in layers else None


def _layer_expression(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def _key_expression(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _listed(names: Sequence[str] | str | None) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names or ()


def _ends(name: str, tail: str) -> bool:
    return name == tail or name.endswith(f".{tail}")


def _pattern_key(keys: Mapping[str, Any], name: str) -> str | None:
    return next((key for key in keys if re.match(_key_expression(key), name)), None)


def _target(config: LoraConfig, name: str, place: _Place) -> Target:
    rank_key, alpha_key = _pattern_key(config.rank_pattern, name), _pattern_key(config.alpha_pattern, name)
    rank = config.r if rank_key is None else config.rank_pattern[rank_key]
    alpha = config.lora_alpha if alpha_key is None else config.alpha_pattern[alpha_key]
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    return Target(name, place.path, place.layer, rank, scale)


def _trained(config: LoraConfig, places: Mapping[str, _Place]) -> tuple[str, ...]:
    trained: list[str] = []
    for entry in config.modules_to_save or ():
        matched = [name for name in places if name.endswith(entry)]
        refused = [name for name in matched if name not in (EMBEDDING, HEAD)]
        if not matched or refused:
            what = f"matches {refused[0]}" if refused else "matches no module"
            raise UserError(
                f"modules_to_save: {entry!r} {what}; embed_tokens and lm_head can be trained in full beside adapters. "
                "For other weights train with method=full."
            )
        trained += matched
    return tuple(name for name in (EMBEDDING, HEAD) if name in trained)


def _check_patterns(config: LoraConfig, targets: Sequence[Target], places: Mapping[str, _Place]) -> None:
    num_layers = 1 + max((p.layer for p in places.values() if p.layer is not None), default=-1)
    for layer in config.layers_to_transform or () if not isinstance(config.layers_to_transform, int) else ():
        if not 0 <= layer < num_layers:
            raise UserError(f"layers_to_transform has {layer}; the model's layers are 0 to {num_layers - 1}")
    for setting, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for key in pattern:
            if not any(re.match(_key_expression(key), target.name) for target in targets):
                chosen = _summary(target.name for target in targets)
                raise UserError(f"{setting}: {key!r} matches none of the adapted modules; they are {chosen}")


def _unfit_message(config: LoraConfig, name: str) -> str:
    given = f"target_modules={_given(config.target_modules)} matches {name}, which"
    if name == EMBEDDING:
        return f"{given} is an embedding; adapters go on linear layers. Train it with modules_to_save=embed_tokens"
    if name.endswith("norm"):
        return f"{given} is a norm; adapters go on linear layers. Leave it out, or train every weight with method=full"
    return f"{given} is not a linear layer; choose names such as q_proj, or 'all-linear'"


def _nothing_message(config: LoraConfig, unused: Sequence[str], places: Mapping[str, _Place]) -> str:
    linear = _summary(name for name, place in places.items() if place.linear)
    given = config.target_modules
    if isinstance(given, str):
        plain = re.fullmatch(r"[\w.]+", given) is not None
        hint = f" (a string is a regular expression for full names; write ['{given}'] for a name)" if plain else ""
        what = f"target_modules={given!r} matches no module{hint}"
    else:
        exists = [name for name in unused if any(_ends(place, name) for place in places)]
        rest = exists if len(exists) == len(unused) else [name for name in unused if name not in exists]
        filtered = ": exclude_modules, modules_to_save or layers_to_transform take it away" if rest is exists else ""
        what = f"target_modules: {', '.join(map(repr, rest))} matches no module{filtered}"
    return f"{what}; the linear modules are {linear}"


def _given(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _summary(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names))
