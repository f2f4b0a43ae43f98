"""Choose the device that a model runs on."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

from ..errors import UserError


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return a device, by default CUDA if available, else the CPU; raise `UserError` if it is not available."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise UserError(f"{device} cannot be used: {str(error).splitlines()[0]}", field="device") from error
    return torch.device(device)


def keep_freed_memory() -> None:
    """
    Let glibc keep the large blocks that steps of training and decoding free and allocate again.

    By default glibc returns them to the system, and the kernel clears their pages each time, which takes a quarter of a
    small model's training step on the CPU and up to a sixth of the time of translating in int8. Has no effect with
    other allocators.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)
