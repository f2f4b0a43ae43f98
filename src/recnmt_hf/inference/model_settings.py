"""Token ids and length limits that decoding reads from a model's configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import UserError


class LengthLimits(NamedTuple):
    """Most source tokens and most new target tokens (control tokens included) that a model has positions for."""

    source: int | None  # None: any number
    target: int | None


def length_limits(config: Any) -> LengthLimits:
    """Return the limits of a model's configuration."""
    sides = getattr(config, "sides_with_positions", ("source", "target"))  # transformers' own models have both
    source, target = (number_of_positions(config, side) for side in ("encoder", "decoder"))
    return LengthLimits(
        source if "source" in sides else None, target - 1 if "target" in sides and target is not None else None
    )


def number_of_positions(config: Any, side: str) -> int | None:
    """Return the number of positions of the encoder or decoder, which may have a configuration of its own."""
    for settings, name in (
        (config, f"max_{side}_position_embeddings"),
        (config, "max_position_embeddings"),
        (getattr(config, side, None), "max_position_embeddings"),
    ):
        positions = getattr(settings, name, None)
        if positions is not None:
            return positions
    return None


def end_ids(model: Any) -> set[int]:
    """Return the ids of the tokens that end a sentence; none if the model has no such token."""
    end = setting(model, "eos_token_id")
    return set(end) if isinstance(end, (list, tuple)) else {end} - {None}


def start_id(model: Any) -> int:
    """Return the id of the decoder's first input token, by the rule of `generate`; `UserError` if there is none."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        if (start := setting(model, name)) is not None:
            return start
    raise UserError(
        "The model has no decoder_start_token_id, so its decoder cannot start. Set target_lang, or write the one "
        "used in training into generation_config.json.",
        field="decoder_start_token_id",
    )


def complete_token_ids(model: Any) -> None:
    """Take from a model's configuration the token ids that its `generation_config.json` lacks."""
    for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, setting(model, name))


def setting(model: Any, name: str) -> Any:
    """Return a generation setting of a model; its configuration may contain those of older releases."""
    value = getattr(model.generation_config, name, None)
    return getattr(model.config, name, None) if value is None else value
