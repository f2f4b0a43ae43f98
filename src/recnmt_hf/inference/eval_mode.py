"""Run models without dropout and gradients, whatever mode they are in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


_lock = threading.Lock()
# Modules to restore to training mode, with the number of blocks that still need them in evaluation mode.
_users: dict[nn.Module, int] = {}


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """
    Put models into evaluation mode and disable gradients. At the end every submodule returns to its own mode, also
    after an error. Blocks may be nested, and several threads may share a model: the last block restores it. A generator
    must not yield inside the block.
    """
    with _lock:
        switched = [module for model in models for module in model.modules() if module.training or module in _users]
        for module in switched:
            _users[module] = _users.get(module, 0) + 1
            module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        with _lock:
            for module in switched:
                _users[module] -= 1
                if not _users[module]:
                    del _users[module]
                    module.training = True
