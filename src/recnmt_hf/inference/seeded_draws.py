"""Sampling from a random generator of its own, since `generate` takes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SeededDraws(TorchFunctionMode):
    """
    Context in which the draws of `generate` come from generators of its own, one for each device. They equal those
    after `torch.manual_seed`; torch's global generators do not change, and each thread has its own context.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device."""
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.multinomial:
            kwargs = {"generator": self.generator(args[0].device), **(kwargs or {})}
        elif func is torch.rand_like:  # assisted decoding accepts drafts by it
            (like,) = args
            return torch.rand(like.shape, generator=self.generator(like.device), device=like.device, dtype=like.dtype)
        return func(*args, **(kwargs or {}))
