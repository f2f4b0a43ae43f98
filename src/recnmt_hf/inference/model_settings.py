"""Token ids and length limits that decoding reads from a model's configuration."""

from __future__ import annotations

from typing import Any, NamedTuple


class LengthLimits(NamedTuple):
    """Most source tokens and most new target tokens (control tokens included) that a model has positions for."""

    source: int | None  # None: any number
    target: int | None


def length_limits(config: Any) -> LengthLimits:
    """Return the limits of a model's configuration."""
    positions = getattr(config, "max_position_embeddings", None)
    sides = getattr(config, "sides_with_positions", ("source", "target"))  # transformers' own models have both
    return LengthLimits(
        positions if "source" in sides else None, positions - 1 if "target" in sides and positions is not None else None
    )


def end_ids(model: Any) -> set[int]:
    """Return the ids of the tokens that end a sentence."""
    end = model.generation_config.eos_token_id
    end = model.config.eos_token_id if end is None else end
    return set(end) if isinstance(end, (list, tuple)) else {end}


def start_id(model: Any) -> int:
    """Return the id of the decoder's first input token."""
    start = model.generation_config.decoder_start_token_id
    return model.config.decoder_start_token_id if start is None else start


def target_vocabulary_size(config: Any) -> int:
    """Return the number of target token ids."""
    return getattr(config, "decoder_vocab_size", None) or config.vocab_size
