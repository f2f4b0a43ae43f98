"""Labels of tokens in tables and pictures."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def token_names(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return the text of each token, or its name in the vocabulary if the text is blank."""
    names = tokenizer.convert_ids_to_tokens(ids)
    texts = (str(tokenizer.decode([token])).strip() for token in ids)
    return [text or str(name) for text, name in zip(texts, names, strict=True)]
