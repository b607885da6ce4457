"""Where jax shall run when nobody has said so, and what that means for speed."""

import os
import sys
from collections.abc import Collection
from pathlib import Path


def has_nvidia_device() -> bool:
    """Whether this machine shows an NVIDIA device: a device node, the kernel driver, or WSL's /dev/dxg."""
    return (
        any(Path("/dev").glob("nvidia[0-9]*"))
        or Path("/proc/driver/nvidia/version").exists()
        or Path("/dev/dxg").exists()
    )


def choose_platform() -> None:
    """Ask jax for the CPU where there is no NVIDIA device and the user named no platform.

    With jax's CUDA plugin installed and no GPU, jax otherwise prints a traceback about cuDNN before it falls back.
    """
    if has_nvidia_device():
        _set_up_gpu()
        return
    if os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME"):
        return
    if "jax" in sys.modules:
        import jax

        if not jax.config.jax_platforms:  # type: ignore[attr-defined]
            jax.config.update("jax_platforms", "cpu")
        return
    os.environ["JAX_PLATFORMS"] = "cpu"


def user_cache() -> Path:
    """The user's folder for what can be made again: $FASTJAX_CACHE, else in XDG's cache folder, else in ~/.cache."""
    own = os.environ.get("FASTJAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastjax"


def _set_up_gpu() -> None:
    """What jax shall do on a GPU unless the user says otherwise by its own variables.

    Compiled programs are kept on the disk: a step of a large model takes half a minute to compile. The allocator takes
    nearly all of the memory instead of three quarters. Both are read when jax is loaded.
    """
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(user_cache() / "xla"))
    if not any(name in os.environ for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")):
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"


def note_slow_dtype(dtype: str, given: Collection[str]) -> None:
    """Say on stderr that float32 is faster, if this is a CPU and bfloat16 was the default's choice.

    Args: given: names of the settings that the user gave.
    """
    import jax

    if dtype == "bfloat16" and "dtype" not in given and jax.default_backend() == "cpu":
        print("note: bfloat16 is slow on a CPU; --dtype float32 is faster there", file=sys.stderr)
