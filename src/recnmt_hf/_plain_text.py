"""Text as translation reads it: what looks like a control token is text, and what shows nothing is empty."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


# Categories of Unicode without a visible sign: controls, formats (zero-width, soft hyphen, byte order mark), spaces.
INVISIBLE_CATEGORIES = {"Cc", "Cf", "Zs", "Zl", "Zp"}
# Letters and marks that show nothing by themselves: fillers and variation selectors (Default_Ignorable_Code_Point).
INVISIBLE_CHARACTERS = frozenset(
    map(
        chr,
        [
            *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0),
            *range(0x180B, 0x1810),
            *range(0xFE00, 0xFE10),
            *range(0xE0100, 0xE01F0),
        ],
    )
)


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it is empty, or holds only spaces, controls and zero-width characters."""
    return all(
        character in INVISIBLE_CHARACTERS or unicodedata.category(character) in INVISIBLE_CATEGORIES
        for character in text
    )


def encode_plain(
    tokenizer: PreTrainedTokenizerBase, text: str | Sequence[str], is_target: bool = False, **kwargs: Any
) -> BatchEncoding:
    """
    The tokenizer's encoding of a text or a batch of texts, in which `</s>`, `<pad>` and the like are ordinary
    characters: only the tokenizer itself adds control tokens. Nothing is cut.

    Args:
        is_target (`bool`, *optional*, defaults to `False`): Encodes a translation, for tokenizers that treat the sides
            apart.
        **kwargs: Passed on to the tokenizer.
    """
    given = {"text_target": text} if is_target else {"text": text}
    return tokenizer(**given, truncation=False, verbose=False, split_special_tokens=True, **kwargs)


def truncated(ids: list[int], limit: int, ends: Collection[int | None]) -> list[int]:
    """Token ids cut off to `limit`; a sentence that ended in an end token still does."""
    if len(ids) <= limit:
        return ids
    return [*ids[: limit - 1], ids[-1]] if ids[-1] in ends else ids[:limit]


def control_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of tokens that stand for no text; the unknown token stands for some."""
    return set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
