"""Choice of an op's implementation, and what is known of the device that will run it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax

# The oldest generation that Pallas' Triton backend compiles for.
_OLDEST_COMPUTE_CAPABILITY = 8.0


_preferred: ContextVar[tuple[str, ...]] = ContextVar("preferred implementations", default=())


@contextmanager
def prefer(*implementations: str) -> Iterator[None]:
    """Inside, a call that names no implementation takes the first of these that its op has and that can run here.

    What is traced outside, and what jax has traced before, is not changed.
    """
    token = _preferred.set(implementations)
    try:
        yield
    finally:
        _preferred.reset(token)


def target_device() -> jax.Device:
    """The device that computations go to now: jax's default device, which may be a described one."""
    device = jax.config.values["jax_default_device"]
    if device is None or isinstance(device, str):
        return jax.devices(device)[0]
    return device


def target_is_gpu() -> bool:
    return target_device().platform in ("gpu", "cuda")


def triton_reason(interpret: bool = False) -> str | None:
    """Why a Pallas-Triton kernel cannot run here; None if it can."""
    if interpret:
        return None
    device = target_device()
    if not target_is_gpu():
        return (
            f"needs an NVIDIA GPU, and this process computes on {device.platform}; interpret=True runs it there, slowly"
        )
    capability = float(getattr(device, "compute_capability", _OLDEST_COMPUTE_CAPABILITY))
    if capability < _OLDEST_COMPUTE_CAPABILITY:
        return f"needs compute capability 8.0 or later; {device.device_kind} has {capability}"
    return None


def choose(op: str, implementation: str | None, reasons: Mapping[str, str | None]) -> str:
    """The implementation to run.

    Args:
      op: the op's name, for messages.
      implementation: a name, which is taken or refused; None takes the first that can run.
      reasons: implementation -> why it cannot run here, or None; in order of preference.
    Returns: a key of `reasons`.
    Raises: ValueError for an unknown name; NotImplementedError, with the reasons, where nothing that may run can.
    """
    if implementation is None:
        first = [name for name in _preferred.get() if name in reasons]
        for name in (*first, *reasons):
            if reasons[name] is None:
                return name
        tried = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"{op}: no implementation can run here: {tried}")
    if implementation not in reasons:
        raise ValueError(f"{op}: implementation={implementation!r} is unknown; known: {', '.join(reasons)}")
    if (reason := reasons[implementation]) is not None:
        raise NotImplementedError(f"{op}: implementation={implementation!r} {reason}")
    return implementation
