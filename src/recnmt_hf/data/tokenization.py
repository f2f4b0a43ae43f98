"""Training tokenizers with `tokenizers`: BPE of a chosen size, words or characters, joint or one for each side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .._loading_errors import explain, is_about_files, shorten
from .._values import Range, check_value
from ..models.user_errors import UserError


PAD, START, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = [PAD, START, END, UNKNOWN]
TOKENIZER_TYPES = ("bpe", "word", "space", "character")
# Stands for the space before a symbol; where there is none, no space parts it from the one before. In a text it is
# read as a space.
GLUE = "▁"
# The names that `tokenizers` gives to single bytes.
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# From this size on a BPE vocabulary has them unless a caller says otherwise.
BYTE_FALLBACK_SIZE = 1000


def train_tokenizer(
    texts: Iterable[str],
    kind: str = "bpe",
    vocab_size: int = 8000,
    min_frequency: int = 1,
    lowercase: bool = False,
    max_length: int = 1024,
    byte_fallback: bool | None = None,
) -> PreTrainedTokenizerFast:
    """
    Trains a tokenizer whose decoding gives the plain text back.

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>`, `<unk>`, as the zoo's configurations have them by default; every encoded
    sentence ends in `</s>`. Where a text holds these names, they are ordinary characters.

    Args:
        texts (iterable of `str`): Raw sentences; of both languages for a joint vocabulary.
        kind (`str`, *optional*, defaults to `"bpe"`):
            `"bpe"`: byte-pair encoding within words (Sennrich et al., 2016) over word pieces that mark the space before
            them. `"word"`: words and punctuation marks. `"space"`: what spaces part, for text that is tokenised
            already. `"character"`: single characters.
        vocab_size (`int`, *optional*, defaults to 8000): Symbols including the special ones; fewer where the text has
            fewer.
        min_frequency (`int`, *optional*, defaults to 1): Rarer words, pairs or characters are left out.
        lowercase (`bool`, *optional*, defaults to `False`): Whether case is dropped.
        max_length (`int`, *optional*, defaults to 1024): `model_max_length` of the tokenizer.
        byte_fallback (`bool`, *optional*): Whether 256 symbols of the vocabulary are bytes, in which BPE writes
            characters that it does not know, so that every text comes back and nothing is unknown. `None`: for BPE with
            `vocab_size` of 1000 or more. The alphabet is then cut to its most frequent characters where it would
            exceed the vocabulary.

    Returns:
        `PreTrainedTokenizerFast`: `save_pretrained` writes what `AutoTokenizer` loads.

    Raises:
        ValueError: There is no such kind, a size is not allowed, the vocabulary is too small, or there is no text.
    """
    if kind not in TOKENIZER_TYPES:
        raise UserError(f"There is no tokenizer {kind!r}; choose one of {', '.join(TOKENIZER_TYPES)}.")
    vocab_size = check_value("vocab_size", vocab_size, int, Range(least=1))
    min_frequency = check_value("min_frequency", min_frequency, int, Range(least=1))
    max_length = check_value("max_length", max_length, int, Range(least=1))
    check_value("byte_fallback", byte_fallback, bool | None)
    if byte_fallback is None:
        byte_fallback = kind == "bpe" and vocab_size >= BYTE_FALLBACK_SIZE
    if byte_fallback and kind != "bpe":
        raise UserError(
            f"A {kind!r} tokenizer cannot fall back to bytes; only BPE can. Remedy: choose kind bpe, or leave out "
            "byte_fallback."
        )
    reserved = len(SPECIAL_TOKENS) + (len(BYTES) if byte_fallback else 0)
    if vocab_size <= reserved:
        raise UserError(
            f"vocab_size={vocab_size} leaves no room beside the {len(SPECIAL_TOKENS)} special tokens"
            f"{' and 256 bytes' if byte_fallback else ''}. Remedy: use some thousands for BPE, at least the alphabet's "
            "size for characters."
        )
    if isinstance(texts, str):
        raise UserError("texts must be a list of sentences, not one text. Remedy: put the text into a list.")
    # Typographic variants of space and composition are one; nothing else of the text is changed.
    steps = [normalizers.NFC(), normalizers.Replace(Regex(rf"[\s\u200b{GLUE}]+"), " "), normalizers.Strip()]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN) if kind == "bpe" else models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(steps + ([normalizers.Lowercase()] if lowercase else []))
    tokenizer.pre_tokenizer, tokenizer.decoder = build_splitting(kind)
    common: dict[str, Any] = {"min_frequency": min_frequency, "special_tokens": SPECIAL_TOKENS, "show_progress": False}
    common["vocab_size"] = vocab_size - (len(BYTES) if byte_fallback else 0)
    if kind == "bpe":
        if byte_fallback:
            common.update(limit_alphabet=vocab_size - reserved, initial_alphabet=[GLUE])
        trainer: trainers.Trainer = trainers.BpeTrainer(**common)
    else:
        trainer = trainers.WordLevelTrainer(**common)
    tokenizer.train_from_iterator(only_text(texts), trainer)
    learned = set(tokenizer.get_vocab()) - {*SPECIAL_TOKENS, *([GLUE] if byte_fallback else [])}
    if not learned:
        raise UserError("The tokenizer found no text to learn from. Remedy: give at least one sentence.")
    if byte_fallback:
        tokenizer = with_bytes(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, SPECIAL_TOKENS.index(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=AddedToken(PAD, special=True, normalized=False),
        bos_token=AddedToken(START, special=True, normalized=False),
        eos_token=AddedToken(END, special=True, normalized=False),
        unk_token=AddedToken(UNKNOWN, special=True, normalized=False),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # saved too: whoever loads the tokenizer reads `</s>` in a text as text
        model_input_names=["input_ids", "attention_mask"],
    )


def only_text(texts: Iterable[str]) -> Iterator[str]:
    """The texts, each looked at: whatever is no text is named."""
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise UserError(f"Text {number} to train the tokenizer on is no text but {text!r}. Remedy: give sentences.")
        yield text


def with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """A trained BPE tokenizer with symbols for single bytes, behind the special tokens, and a decoder for them."""
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    first = len(SPECIAL_TOKENS)
    vocabulary = {token: id if id < first else id + len(BYTES) for token, id in model["vocab"].items()}
    vocabulary.update({byte: first + i for i, byte in enumerate(BYTES)})
    model["vocab"], model["byte_fallback"] = vocabulary, True
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(GLUE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def build_splitting(kind: str) -> tuple[pre_tokenizers.PreTokenizer, decoders.Decoder]:
    """How text falls into units, and how units become text again, for a kind of tokenizer."""
    metaspace = pre_tokenizers.Metaspace(replacement=GLUE, prepend_scheme="always")
    joined = decoders.Metaspace(replacement=GLUE, prepend_scheme="always")
    if kind == "character":
        # The space is a character of its own.
        each = pre_tokenizers.Split(Regex("."), behavior="isolated")
        spaces = pre_tokenizers.Split(" ", behavior="isolated")
        return pre_tokenizers.Sequence([spaces, each]), decoders.Fuse()
    if kind == "space":
        return metaspace, joined
    # Runs of letters, of digits, and single other marks, each with the space before it.
    marks = pre_tokenizers.Split(
        Regex(rf"{GLUE}?\p{{L}}[\p{{L}}\p{{M}}]*|{GLUE}?\p{{N}}+|{GLUE}?[^{GLUE}\p{{L}}\p{{N}}]"), "isolated"
    )
    return pre_tokenizers.Sequence([metaspace, marks]), joined


def load_tokenizer(path: str | Path, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase:
    """
    `AutoTokenizer.from_pretrained`, checked for what translation needs.

    Args:
        path (`str` or `Path`): Folder or model id.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code that its files bring along may run;
            nobody is asked.
        **kwargs: Those of `from_pretrained`.

    Raises:
        ValueError: Nothing loadable is there, or the tokenizer lacks padding or end-of-sentence tokens.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:
        if not is_about_files(error):
            raise
        if "trust_remote_code" in str(error):
            raise UserError(explain(error, str(path), "tokenizer")) from error
        raise UserError(
            f"No tokenizer could be loaded from {path} ({shorten(str(error))}). Remedy: give a folder that holds "
            "tokenizer.json, e.g. one written by training or `recnmt tokenizer`."
        ) from error
    require_control_tokens(tokenizer, path)
    return without_origin(tokenizer)


def without_origin(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """
    Remove settings that would be saved with a loaded tokenizer: how it was loaded, and `auto_map`, which names remote
    code even where an installed class was used. If the tokenizer's class is remote code, saving adds the entry again.
    """
    for name in ("is_local", "local_files_only", "auto_map"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def require_control_tokens(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raises `UserError` when a tokenizer has no padding or end-of-sentence token; `path` is where it is from."""
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, f"{name}_id") is None:
            raise UserError(
                f"The tokenizer in {path} has no {name}. Remedy: set it (tokenizer.{name} = ...) and save the "
                "tokenizer again."
            )
