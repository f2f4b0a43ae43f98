"""Choose the device that a model runs on."""

from __future__ import annotations

import torch

from ..models.user_errors import UserError


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """
    Return a device of this machine.

    Args:
        device (`str` or `torch.device`, *optional*): Defaults to CUDA if available, else the CPU.

    Raises:
        ValueError: The device does not exist or is not available.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        if resolved.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        reason = "no such kind is known" if reason.startswith("Expected one of") else reason
        available = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise UserError(
            f"The device {str(device)!r} cannot be used ({reason}). Remedy: this machine has {', '.join(available)}."
        ) from error
    return resolved
