"""Check that a loaded model is complete and that its weights are finite."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.languages import list_names
from ..errors import UserError


# Tables that models compute themselves; files of older releases may contain them.
COMPUTED = re.compile(r"(embed_positions\.weights?|position_ids|inv_freq|num_batches_tracked)$")


def check_loading(model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """
    Raise `UserError` unless all weights of a model come from its files, and the files contain no others. `info` is the
    report of `from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)`, without computed and tied
    parameters.
    """
    kinds: dict[str, Collection[str]] = {
        "missing": info["missing_keys"],
        "of another shape": [f"{name} {tuple(saved)} for {tuple(own)}" for name, saved, own in info["mismatched_keys"]],
        "unexpected": [name for name in info["unexpected_keys"] if not COMPUTED.search(name)],
    }
    if faults := [f"{kind}: {list_names(sorted(names))}" for kind, names in kinds.items() if names]:
        raise UserError(f"its weights do not match its config.json ({'; '.join(faults)}).", field=model.name_or_path)


@torch.no_grad()
def check_weights(model: PreTrainedModel) -> None:
    """
    Raise `UserError` if a parameter is NaN or infinite, or a saved buffer has NaN (an infinite bias forbids a token).
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    checks: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        # Quantized and sharded weights are classes of their own that need not know these operations.
        is_plain = type(tensor) is torch.Tensor and tensor.device.type != "meta"
        if is_plain and tensor.numel() and tensor.is_floating_point() and tensor.element_size() > 1:
            low, high = torch.aminmax(tensor)  # both are NaN if any is
            checks[name] = low.isfinite() & high.isfinite() if name in parameters else ~low.isnan()
    results = torch.stack([check.to(model.device) for check in checks.values()]).tolist() if checks else []
    if bad := [name for name, is_finite in zip(checks, results, strict=True) if not is_finite]:
        raise UserError(f"These weights are NaN or infinite: {list_names(sorted(bad))}.")
