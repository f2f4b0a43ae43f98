"""Text without control tokens, and blank text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


# Categories of Unicode without a visible sign: controls, formats (zero-width, soft hyphen, byte order mark), spaces.
INVISIBLE_CATEGORIES = {"Cc", "Cf", "Zs", "Zl", "Zp"}
# Invisible letters and marks: fillers and variation selectors (Default_Ignorable_Code_Point).
FILLERS = (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0)
SELECTORS = (range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
INVISIBLE_CHARACTERS = frozenset(map(chr, chain(FILLERS, *SELECTORS)))
# Scripts that put no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, CJK signs and punctuation, Kana,
# Bopomofo, full-width forms. Hangul has spaces.
UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3000-\u30ff\u3100-\u312f\u31a0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff9f\U00020000-\U0003ffff"
)
IS_UNSPACED = re.compile(f"[{UNSPACED}]")


def is_blank(text: str) -> bool:
    """Return whether a text is empty or contains only spaces, controls and zero-width characters."""
    return not "!" <= text[:1] <= "~" and all(  # most texts begin with a visible sign of ASCII
        character in INVISIBLE_CHARACTERS or unicodedata.category(character) in INVISIBLE_CATEGORIES
        for character in text
    )


def count_words(text: str) -> int:
    """Return the number of words of a text; in scripts without spaces between words, that of its characters."""
    return len(IS_UNSPACED.sub(r" \g<0> ", text).split())


def on_one_line(text: str) -> str:
    """Replace what ends a line, such as a carriage return or U+2028, by a space."""
    return " ".join(text.splitlines())


def encode_plain(
    tokenizer: PreTrainedTokenizerBase, text: str | Sequence[str], is_target: bool = False, **kwargs: Any
) -> BatchEncoding:
    """Encode texts, or translations (`is_target`), without truncation; `</s>` in them is ordinary text."""
    texts = {"text_target": text} if is_target else {"text": text}
    return tokenizer(**texts, truncation=False, verbose=False, split_special_tokens=True, **kwargs)


def ids_of_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], is_target: bool = False, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of texts as [`encode_plain`]; without its other results, which take half of its time."""
    from transformers import PreTrainedTokenizerFast

    if not texts:  # which transformers' own tokenizers reject
        return []
    if type(tokenizer) is not PreTrainedTokenizerFast:  # a subclass may prepare texts
        return encode_plain(tokenizer, texts, is_target, add_special_tokens=add_special_tokens)["input_ids"]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]


def control_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of control tokens. The unknown token is text."""
    return set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
