"""Token ids and length limits that decoding reads from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LengthLimits:
    """
    Numbers of tokens that a model's position tables allow; `None`: any number.

    Attributes:
        source (`int`, *optional*): Source tokens, control tokens included.
        target (`int`, *optional*): New target tokens, end token included.
    """

    source: int | None
    target: int | None


def length_limits(config: Any) -> LengthLimits:
    """Return the limits of a model's configuration."""
    positions = getattr(config, "max_position_embeddings", None)
    sides = getattr(config, "sides_with_positions", ("source", "target"))  # transformers' own models have both
    return LengthLimits(
        positions if "source" in sides else None,
        positions - 1 if "target" in sides and positions is not None else None,
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
