"""Train tokenizers with `tokenizers`: BPE of a chosen size, words or characters, joint or one for each side."""

import json
import random
from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .._loading_errors import explained_loading
from .._plain_text import control_ids, encode_plain, is_blank
from ..errors import UserError, short_repr
from ..options import check_value


SPECIAL_TOKENS = PAD, START, END, UNKNOWN = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENIZER_TYPES = ("bpe", "word", "space", "character")
GLUE = "▁"  # marks a symbol that follows a space; in a text it is read as a space
# The names that `tokenizers` gives to single bytes, which BPE vocabularies of at least this size include by default.
BYTES, BYTE_FALLBACK_SIZE = [f"<0x{byte:02X}>" for byte in range(256)], 1000
# Random segmentations that a word has with BPE dropout, and those that are remembered.
VARIANTS, REMEMBERED = 64, 2**18
NO_DROPOUT = "tokenizer.dropout is only supported by tokenizers of kind bpe."


def train_tokenizer(
    texts: Iterable[str],
    kind: str = "bpe",
    vocab_size: int = 8000,
    min_frequency: int = 1,
    lowercase: bool = False,
    max_length: int = 1024,
    byte_fallback: bool | None = None,
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """
    Train a tokenizer whose decoding restores the plain text.

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>`, `<unk>`, the defaults of the package's configurations. Every encoded sentence
    ends with `</s>`. In a text, these names are ordinary characters.

    Args:
        texts (iterable of `str`): Raw sentences; of both languages for a joint vocabulary.
        kind (`str`, *optional*, defaults to `"bpe"`):
            `"bpe"`: byte-pair encoding within words (Sennrich et al., 2016) over word pieces that mark the space before
            them. `"word"`: words and punctuation marks. `"space"`: units between spaces, for tokenized text.
            `"character"`: single characters.
        vocab_size (`int`, *optional*, defaults to 8000): Symbols including special ones; a text may have fewer.
        min_frequency (`int`, *optional*, defaults to 1): Minimum count of words, pairs or characters in the vocabulary.
        lowercase (`bool`, *optional*, defaults to `False`): Whether to lowercase all text.
        max_length (`int`, *optional*, defaults to 1024): `model_max_length` of the tokenizer.
        byte_fallback (`bool`, *optional*): Whether 256 symbols of the vocabulary are bytes, in which BPE encodes
            unknown characters, so that every text can be decoded. `None`: for BPE with `vocab_size` of 1000 or more.
            The alphabet is then limited to its most frequent characters if it exceeds the vocabulary. Other kinds
            have no bytes.
        tags (sequence of `str`, *optional*): Symbols that stay whole in every text, such as `>>de<<`
            ([`~recnmt_hf.data.tokenization.add_tags`]). They count as symbols.

    Returns:
        `PreTrainedTokenizerFast`: `save_pretrained` writes files for `AutoTokenizer`.

    Raises:
        ValueError: A value is not allowed, the vocabulary is too small, or there is no text.
    """
    check_value("kind", kind, Literal[TOKENIZER_TYPES])
    check_tags(tags, "tags", SPECIAL_TOKENS)
    byte_fallback = kind == "bpe" and (vocab_size >= BYTE_FALLBACK_SIZE if byte_fallback is None else byte_fallback)
    if isinstance(texts, str):
        raise UserError("texts must be a list of sentences, got one text.", field="texts")
    reserved = len(SPECIAL_TOKENS) + (len(BYTES) if byte_fallback else 0)
    learnable = int(vocab_size) - len(tags) - reserved
    # Only variants of space and of Unicode composition are unified.
    steps = [normalizers.NFC(), normalizers.Replace(Regex(rf"[\s\u200b{GLUE}]+"), " "), normalizers.Strip()]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN) if kind == "bpe" else models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(steps + ([normalizers.Lowercase()] if lowercase else []))
    tokenizer.pre_tokenizer, tokenizer.decoder = build_splitting(kind)
    size = max(learnable, 0)
    settings: dict[str, Any] = {"limit_alphabet": size, "initial_alphabet": [GLUE]} if byte_fallback else {}
    settings |= {"min_frequency": min_frequency, "special_tokens": SPECIAL_TOKENS, "show_progress": False}
    trainer_class: Any = trainers.BpeTrainer if kind == "bpe" else trainers.WordLevelTrainer
    tokenizer.train_from_iterator(texts, trainer_class(vocab_size=size + len(SPECIAL_TOKENS), **settings))
    if learnable < 1 or set(tokenizer.get_vocab()) <= {*SPECIAL_TOKENS, *([GLUE] if byte_fallback else [])}:
        least = f"{reserved + len(tags)}, the number of control tokens, bytes and tags"
        raise UserError(f"The texts are empty, or vocab_size={vocab_size} is at most {least}.", field="vocab_size")
    if byte_fallback:
        tokenizer = add_byte_tokens(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, SPECIAL_TOKENS.index(END))]
    )
    names = {"pad_token": PAD, "bos_token": START, "eos_token": END, "unk_token": UNKNOWN}
    trained = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: AddedToken(token, special=True, normalized=False) for name, token in names.items()},
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # saved too: `</s>` in a text is text
        model_input_names=["input_ids", "attention_mask"],
    )
    add_tags(trained, tags)
    return trained


def add_byte_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a trained BPE tokenizer with symbols for bytes after the special tokens, and a decoder for them."""
    state, first = json.loads(tokenizer.to_str()), len(SPECIAL_TOKENS)
    model = state["model"]
    vocabulary = {token: id if id < first else id + len(BYTES) for token, id in model["vocab"].items()}
    vocabulary.update({byte: first + i for i, byte in enumerate(BYTES)})
    model["vocab"], model["byte_fallback"] = vocabulary, True
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(GLUE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def build_splitting(kind: str) -> tuple[pre_tokenizers.PreTokenizer, decoders.Decoder]:
    """Return the pre-tokenizer that splits text into units and the decoder that joins them, for a kind of tokenizer."""
    metaspace = pre_tokenizers.Metaspace(replacement=GLUE, prepend_scheme="always")
    joined = decoders.Metaspace(replacement=GLUE, prepend_scheme="always")
    if kind == "character":
        spaces, characters = (pre_tokenizers.Split(unit, behavior="isolated") for unit in (" ", Regex(".")))
        return pre_tokenizers.Sequence([spaces, characters]), decoders.Fuse()
    if kind == "space":
        return metaspace, joined
    # Runs of letters, of digits, and single other marks, each with the space before it.
    marks = pre_tokenizers.Split(
        Regex(rf"{GLUE}?\p{{L}}[\p{{L}}\p{{M}}]*|{GLUE}?\p{{N}}+|{GLUE}?[^{GLUE}\p{{L}}\p{{N}}]"), "isolated"
    )
    return pre_tokenizers.Sequence([metaspace, marks]), joined


def load_tokenizer(path: str | Path, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase:
    """
    Load a tokenizer with `AutoTokenizer.from_pretrained`, and check that it can be used for translation.

    Args:
        path (`str` or `Path`): Folder or model id.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code in its files without a prompt.
        **kwargs: Those of `from_pretrained`.

    Raises:
        ValueError: The tokenizer cannot be loaded, or has no padding or end-of-sentence token.
    """
    tokenizer = load_unchecked(path, trust_remote_code=trust_remote_code, **kwargs)
    require_control_tokens(tokenizer, path)
    return tokenizer


def load_unchecked(path: str | Path, what: str = "tokenizer", **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer without settings that would be saved with it; messages call it `what`."""
    from transformers import AutoTokenizer

    with explained_loading(path, what):
        tokenizer = AutoTokenizer.from_pretrained(str(path), **{"trust_remote_code": False, **kwargs})
    for name in ("is_local", "local_files_only", "auto_map"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def require_control_tokens(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raise `UserError` if a tokenizer from `path` has no padding or end-of-sentence token."""
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, f"{name}_id") is None:
            remedy = f"Set tokenizer.{name} and save it again"
            raise UserError(f"The tokenizer in {path} has no {name}. {remedy}.", field=path)


def check_tags(tags: Sequence[Any], field: str, reserved: Sequence[str] = ()) -> None:
    """Raise `UserError` for a tag that is not text without spaces, is given twice, or is a control token."""
    for number, tag in enumerate(tags):
        is_text = isinstance(tag, str) and not is_blank(tag) and tag.split() == [tag]
        if not is_text or tag in tags[:number] or tag in reserved:
            place = f"{field}[{number}]"
            raise UserError(f"{place}={short_repr(tag)} must be a new tag without spaces, such as >>de<<.", field=place)


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
    controls = control_ids(tokenizer)
    symbols = [id for id in encode_plain(tokenizer, tag, is_target)["input_ids"] if id not in controls]
    if len(symbols) != 1 or symbols[0] == tokenizer.unk_token_id:
        remedy = "Add it to tokenizer.tags, or use a tokenizer that contains it"
        raise UserError(f"{field}={short_repr(tag)} is split into {len(symbols)} symbols. {remedy}.", field=field)


class Resegmenter:
    """
    BPE dropout (Provilkov et al., 2020): divides the words of a fast BPE tokenizer's ids anew, and leaves each merge
    out with probability `dropout`. That of `tokenizers` cannot be seeded, so a resumed run would differ.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = {} if backend is None else json.loads(backend.to_str())["model"]
        if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise UserError(NO_DROPOUT, field="tokenizer.dropout")
        self.dropout = dropout
        self.ids: dict[str, int] = model["vocab"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        self.ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        # Bytes, unknown symbols, control tokens and tags are no text, and stay as they are.
        symbols = {left + right for left, right in self.ranks} | {symbol for symbol in self.ids if len(symbol) == 1}
        fixed = tokenizer.added_tokens_decoder
        self.texts = {id: symbol for symbol, id in self.ids.items() if symbol in symbols and id not in fixed}

    def __call__(self, ids: Sequence[int], seed: str) -> list[int]:
        """Return token ids of the same text; the seed draws the segmentation of each word."""
        rng = random.Random(seed)
        result: list[int] = []
        word = ""
        for id in [*ids, None]:
            text = None if id is None else self.texts.get(id)
            if word and (text is None or text.startswith(GLUE)):
                result += segmentation(self, word, rng.randrange(VARIANTS))
                word = ""
            if text is not None:
                word += text
            elif id is not None:
                result.append(id)
        return result


@lru_cache(REMEMBERED)
def segmentation(resegmenter: Resegmenter, word: str, variant: int) -> list[int]:
    """Return the ids of a word: merge its symbols by rank, and leave out merges at random, anew in each round."""
    rng, dropout = random.Random(f"{word}-{variant}"), resegmenter.dropout
    symbols = list(word)
    while len(symbols) > 1:
        found = [
            (rank, place)
            for place, pair in enumerate(pairwise(symbols))
            if (rank := resegmenter.ranks.get(pair)) is not None and (dropout == 0 or rng.random() >= dropout)
        ]
        if not found:
            break
        _, place = min(found)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    return [resegmenter.ids[symbol] for symbol in symbols]


class ResegmentedDataset(Dataset[dict[str, Any]]):
    """A prepared dataset whose pairs have other segmentations, of at most `longest` tokens, by seed, epoch and row."""

    def __init__(self, data: Any, resegmenters: tuple[Resegmenter, Resegmenter], seed: int, longest: int | None = None):
        self.data, self.resegmenters, self.seed, self.longest = data, resegmenters, seed, longest
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers of a loader read it too

    def __len__(self) -> int:
        return len(self.data)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the segmentations."""
        self.epoch.fill_(epoch)

    def check(self) -> None:
        """Raise `UserError` if without dropout words of some pairs are divided differently than by the tokenizers."""
        rows = self.data.__getitems__(list(range(min(len(self.data), 500))))
        for name, plain in zip(("input_ids", "labels"), map(copy, self.resegmenters), strict=True):
            plain.dropout = 0.0
            if any(plain(row[name], "") != list(row[name]) for row in rows):
                raise UserError(NO_DROPOUT, field="tokenizer.dropout")

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        rows = [dict(row) for row in self.data.__getitems__(indices)]
        for index, row in zip(indices, rows, strict=True):
            for name, resegmenter in zip(("input_ids", "labels"), self.resegmenters, strict=True):
                ids = resegmenter(row[name], f"{name}-{self.seed}-{int(self.epoch)}-{index}")
                if self.longest is None or len(ids) <= self.longest:
                    row[name] = ids
        return rows
