"""The tokenizers of a run: loaded, taken over from a trained model, or trained; kept in the output folder whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .._loading_errors import looks_local
from ..data.corpora import load_pairs
from ..data.text import SentencePair
from ..data.tokenization import load_tokenizer, train_tokenizer
from ..data.tokenizer_pair import TARGET_TOKENIZER, TokenizerPair
from ..models.user_errors import MissingFileError
from .processes import say
from .recipe import Recipe


SOURCE_TOKENIZER = "tokenizer"
PARTIAL_TOKENIZERS = "tokenizers.partial"


def prepare_tokenizers(recipe: Recipe, output_dir: Path) -> TokenizerPair:
    """Loads or trains the tokenizers. A warm start keeps those of its baseline."""
    section, baseline = recipe.tokenizer, recipe.model.init_from
    if section.source:
        target = None if section.joint else load_tokenizer(section.target or section.source)
        return TokenizerPair(load_tokenizer(section.source), target)
    kept = kept_tokenizers(output_dir)
    if kept is None:
        if baseline:
            made = tokenizers_of(baseline)
            say(f"The tokenizers are those of {baseline}; none is trained.")
        else:
            say(f"Training the {'joint ' if section.joint else ''}{section.kind} tokenizer.")
            made = trained_tokenizers(recipe)
        keep_tokenizers(made, output_dir)
        return made
    return kept


def kept_tokenizers(output_dir: Path) -> TokenizerPair | None:
    """The tokenizers that [`keep_tokenizers`] left in the folder, or `None`."""
    if not (output_dir / SOURCE_TOKENIZER).is_dir():
        return None
    return TokenizerPair.load(output_dir, source_subfolder=SOURCE_TOKENIZER)


def keep_tokenizers(tokenizers: TokenizerPair, output_dir: Path) -> None:
    """
    Writes tokenizers into the output folder. The source's folder is renamed into its place last: where it is, both are
    there and whole, whenever the run may be killed.
    """
    forget_tokenizers(output_dir)
    working = output_dir / PARTIAL_TOKENIZERS
    tokenizers.save(working, source_subfolder=SOURCE_TOKENIZER)
    if not tokenizers.is_joint:
        os.replace(working / TARGET_TOKENIZER, output_dir / TARGET_TOKENIZER)
    os.replace(working / SOURCE_TOKENIZER, output_dir / SOURCE_TOKENIZER)
    working.rmdir()


def forget_tokenizers(output_dir: Path) -> None:
    """Deletes the tokenizers kept in the folder, whole or not; the source's folder loses its name first."""
    working = output_dir / PARTIAL_TOKENIZERS
    shutil.rmtree(working, ignore_errors=True)
    if (output_dir / SOURCE_TOKENIZER).is_dir():
        os.replace(output_dir / SOURCE_TOKENIZER, working)
        shutil.rmtree(working)
    shutil.rmtree(output_dir / TARGET_TOKENIZER, ignore_errors=True)


def trained_tokenizers(recipe: Recipe) -> TokenizerPair:
    """Tokenizers trained on the recipe's training corpora."""
    data, section = recipe.data, recipe.tokenizer

    def texts(side: str) -> Iterator[str]:
        pairs: Iterator[SentencePair] = load_pairs(data.train, data.source_lang, data.target_lang, data.on_empty)
        for pair in islice(pairs, section.max_sentences):
            if side != "target":
                yield pair.source
            if side != "source":
                yield pair.target

    def trained(side: str, kind: str, vocab_size: int) -> PreTrainedTokenizerBase:
        return train_tokenizer(
            texts(side),
            kind,
            vocab_size,
            min_frequency=section.min_frequency,
            lowercase=section.lowercase,
            byte_fallback=section.byte_fallback if kind == "bpe" else None,
        )

    source = trained("both" if section.joint else "source", section.kind, section.vocab_size)
    if section.joint:
        return TokenizerPair(source)
    target_kind = section.target_kind or section.kind
    return TokenizerPair(source, trained("target", target_kind, section.target_vocab_size or section.vocab_size))


def tokenizers_of(model: str | Path) -> TokenizerPair:
    """The tokenizers of a trained model or a checkpoint."""
    model = str(model)
    if looks_local(model) and not (Path(model) / "config.json").is_file():
        raise MissingFileError(
            f"model.init_from={model} holds no model (config.json is missing). Remedy: train the baseline first, or "
            "name its folder."
        )
    tokenizers = TokenizerPair.load(model)
    tokenizers.require_control_tokens(model)
    return tokenizers
