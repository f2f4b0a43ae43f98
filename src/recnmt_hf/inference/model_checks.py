"""Whether what was loaded is a whole model, with weights that compute something."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.user_errors import UserError


# Tables that models compute themselves, which files of older releases may hold.
COMPUTED = re.compile(r"(embed_positions\.weights?|position_ids|inv_freq|num_batches_tracked)$")


def check_loading(model: PreTrainedModel, info: Mapping[str, Iterable[Any]]) -> None:
    """
    Refuses a model that `from_pretrained` filled up with random weights, or whose files hold the weights of another.
    Called before the model moves to a device, which weights without values cannot.

    Args:
        model (`PreTrainedModel`): As loaded.
        info (mapping): What `from_pretrained(..., output_loading_info=True)` reports, where shapes may differ
            (`ignore_mismatched_sizes=True`). Parameters that are computed or tied are not among its keys.

    Raises:
        UserError: A parameter is missing, has another shape or no values, or has no place in the model.
    """
    faults = []
    if missing := sorted({*info["missing_keys"], *without_values(model)}):
        faults.append(f"{named(missing)} missing")
    if wrong := sorted(info["mismatched_keys"]):
        shapes = [f"{name} {tuple(found)} for {tuple(needed)}" for name, found, needed in wrong]
        faults.append(f"{named(shapes, 'has', 'have')} another shape than config.json says")
    if foreign := sorted(name for name in info["unexpected_keys"] if not COMPUTED.search(name)):
        faults.append(f"{named(foreign, 'has', 'have')} no place in the model")
    faults += [str(message).strip() for message in info.get("error_msgs") or []]
    if faults:
        raise UserError(
            f"The weights in {model.name_or_path} are not those of the model in its config.json: {'; '.join(faults)}. "
            "Remedy: give weights and config.json of the same model, whole."
        )


def without_values(model: PreTrainedModel) -> list[str]:
    """Parameters on the meta device, unless they wait elsewhere until they are needed (offloading)."""
    places = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if places & {"cpu", "disk"}:
        return []
    return [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]


def named(names: list[str], one: str = "is", several: str = "are") -> str:
    """The first names of a list, and the verb."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {one if len(names) == 1 else several}"


@torch.no_grad()
def check_weights(model: PreTrainedModel) -> None:
    """
    Refuses a model that cannot compute anything.

    Raises:
        UserError: A parameter has no values, or is NaN or infinite, or a saved buffer has NaN (an infinite bias forbids
            a token).
    """
    if empty := without_values(model):
        raise UserError(f"{named(sorted(empty), 'has', 'have')} no values. Remedy: load the model's weights, whole.")
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
            f"{named(sorted(bad), 'holds', 'hold')} numbers that are not finite (NaN or infinite). Remedy: use an "
            "earlier checkpoint; training diverged, or the file is damaged."
        )
