"""Tags: symbols such as `>>de<<` or `<bt>` that tell a model about a sentence, and stay whole in its tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from .._plain_text import control_ids, encode_plain, is_blank
from ..errors import UserError, short_repr


def check_tags(tags: Sequence[Any], field: str, reserved: Sequence[str] = ()) -> None:
    """Raise `UserError` for a tag that is not text without spaces, is given twice, or is a control token."""
    for number, tag in enumerate(tags):
        is_text = isinstance(tag, str) and not is_blank(tag) and tag.split() == [tag]
        if not is_text or tag in tags[:number] or tag in reserved:
            raise UserError(
                f"{field}[{number}]={short_repr(tag)} must be a new tag: text without spaces, such as >>de<<, and no "
                "control token.",
                field=f"{field}[{number}]",
            )


def add_tags(tokenizer: PreTrainedTokenizerBase, tags: Sequence[str]) -> None:
    """Add tags to a tokenizer; unlike control tokens they are found wherever a text has them."""
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False, rstrip=True) for tag in tags])


def tag_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the tags that were added to a tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {id for id, token in added.items() if not token.special}


def source_tags(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, int]]:
    """Return the texts and ids of the tags that [`add_tags`] added to a tokenizer, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    tags = [(str(token), id) for id, token in added if token.rstrip and not (token.special or token.normalized)]
    return sorted(tags, key=lambda tag: -len(tag[0]))


def split_tags(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the tags of a tokenizer at the beginning of a text, and the rest."""
    tags, rest = tokenizer.convert_ids_to_tokens(sorted(tag_ids(tokenizer))), text
    while (first := next((tag for tag in tags if rest.startswith(tag)), None)) is not None:
        rest = rest.removeprefix(first).lstrip()
    return text[: len(text) - len(rest)].rstrip(), rest


def check_known(tokenizer: PreTrainedTokenizerBase, tag: str, field: str, is_target: bool = False) -> None:
    """Raise `UserError` unless a tag is one symbol of a tokenizer."""
    ids = encode_plain(tokenizer, tag, is_target)["input_ids"]
    symbols = [id for id in ids if id not in control_ids(tokenizer)]
    if len(symbols) != 1 or symbols[0] == tokenizer.unk_token_id:
        raise UserError(
            f"{field}={short_repr(tag)} is split into {len(symbols)} symbols. Add it to tokenizer.tags if the run "
            "trains its tokenizer; otherwise use a tokenizer that contains it.",
            field=field,
        )
