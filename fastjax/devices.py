"""Where jax shall run when nobody has said so."""

import os
import sys
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
    if os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME") or has_nvidia_device():
        return
    if "jax" in sys.modules:
        import jax

        if not jax.config.jax_platforms:  # type: ignore[attr-defined]
            jax.config.update("jax_platforms", "cpu")
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
