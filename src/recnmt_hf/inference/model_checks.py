"""Check that a loaded model is complete and that its weights are finite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.user_errors import UserError


# Tables that models compute themselves; files of older releases may contain them.
COMPUTED = re.compile(r"(embed_positions\.weights?|position_ids|inv_freq|num_batches_tracked)$")


def check_loading(model: PreTrainedModel, info: Mapping[str, Iterable[Any]]) -> None:
    """
    Check that all weights of a model come from its files, and that the files contain no others. To be called before the
    model moves to a device, which fails for weights without values.

    Args:
        model (`PreTrainedModel`): As loaded.
        info (mapping): Report of `from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)`.
            Parameters that are computed or tied are not among its keys.

    Raises:
        UserError: A parameter is missing, has another shape or no values, or has no place in the model.
    """
    faults = []
    if missing := sorted({*info["missing_keys"], *missing_values(model)}):
        faults.append(f"{list_names(missing)} missing")
    if wrong := sorted(info["mismatched_keys"]):
        shapes = [f"{name} {tuple(found)} for {tuple(needed)}" for name, found, needed in wrong]
        faults.append(f"{list_names(shapes, 'has', 'have')} another shape than config.json says")
    if foreign := sorted(name for name in info["unexpected_keys"] if not COMPUTED.search(name)):
        faults.append(f"{list_names(foreign, 'has', 'have')} no place in the model")
    faults += [str(message).strip() for message in info.get("error_msgs") or []]
    if faults:
        raise UserError(
            f"The weights in {model.name_or_path} are not those of the model in its config.json: {'; '.join(faults)}. "
            "Remedy: give weights and config.json of the same model, whole."
        )


def missing_values(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters on the meta device, unless they are offloaded."""
    places = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if places & {"cpu", "disk"}:
        return []
    return [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]


def list_names(names: list[str], one: str = "is", several: str = "are") -> str:
    """Return the first names of a list, and the verb."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {one if len(names) == 1 else several}"


@torch.no_grad()
def check_weights(model: PreTrainedModel) -> None:
    """
    Check that all weights have finite values.

    Raises:
        UserError: A parameter has no values, or is NaN or infinite, or a saved buffer has NaN (an infinite bias forbids
            a token).
    """
    if empty := missing_values(model):
        raise UserError(
            f"{list_names(sorted(empty), 'has', 'have')} no values. Remedy: load the model's weights, whole."
        )
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    saved = {name: tensor for name, tensor in model.state_dict().items() if name in buffers}
    checks: dict[str, torch.Tensor] = {}
    for name, tensor in {**parameters, **saved}.items():
        # Quantized and sharded weights are classes of their own that need not know these operations.
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
        if is_plain and tensor.numel() and tensor.is_floating_point() and tensor.element_size() > 1:
            low, high = torch.aminmax(tensor)  # both are NaN if any is
            checks[name] = low.isfinite() & high.isfinite() if name in parameters else ~low.isnan()
    found = torch.stack([check.to(model.device) for check in checks.values()]).tolist() if checks else []
    if bad := [name for name, right in zip(checks, found, strict=True) if not right]:
        raise UserError(
            f"{list_names(sorted(bad), 'holds', 'hold')} numbers that are not finite (NaN or infinite). Remedy: use an "
            "earlier checkpoint; training diverged, or the file is damaged."
        )
