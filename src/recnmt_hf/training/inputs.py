"""Inputs of a run: tokenizers, training data and validation data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .._loading_errors import looks_local
from ..data.corpora import pairs_of, prepare_dataset
from ..data.text import SentencePair
from ..data.tokenization import load_tokenizer, train_tokenizer
from ..data.tokenizer_pair import TARGET_TOKENIZER, TokenizerPair
from ..errors import MissingFileError
from .processes import logger
from .recipe import DataSection, Recipe, TokenizerSection


# Folder of prepared data in the output folder.
DATA = "data"
SOURCE_TOKENIZER = "tokenizer"
PARTIAL_TOKENIZERS = "tokenizers.partial"


def prepare_inputs(recipe: Recipe, output_dir: Path, checkpoint: Path | None) -> tuple[TokenizerPair, Dataset, Dataset]:
    """Return the tokenizers, which a resumed run takes from its checkpoint, and the training and validation data."""
    tokenizers = prepare_tokenizers(recipe, output_dir) if checkpoint is None else tokenizers_of(checkpoint)
    data = recipe.data
    # Validation pairs are limited only by the model's positions.
    positions = recipe.model.fields.get("max_position_embeddings", 1024) - 1
    longest = (data.max_source_length, data.max_target_length)
    longest_validation = longest if data.on_long == "truncate" else tuple(max(positions, length) for length in longest)

    def prepare(split: str) -> Dataset:
        is_training = split == "train"
        max_source_length, max_target_length = longest if is_training else longest_validation
        return prepare_dataset(
            data.train if is_training else data.validation,
            data.source_lang,
            data.target_lang,
            tokenizers.source,
            tokenizers.target,
            data.cache_dir or str(output_dir / DATA),
            max_source_length=max_source_length,
            max_target_length=max_target_length,
            max_length_ratio=data.max_length_ratio if is_training else None,
            on_empty=data.on_empty,
            num_proc=data.num_proc,
            keep_text=not is_training,
            on_long=data.on_long,
        )

    return tokenizers, prepare("train"), prepare("validation")


def prepare_tokenizers(recipe: Recipe, output_dir: Path) -> TokenizerPair:
    """Load or train the tokenizers. A warm start uses those of its baseline."""
    section, baseline = recipe.tokenizer, recipe.model.init_from
    if section.source:
        source = load_tokenizer(section.source)
        target = None if section.joint else load_tokenizer(section.target or section.source)
        return TokenizerPair(source, target)
    tokenizers = kept_tokenizers(output_dir)
    if tokenizers is None:
        if baseline:
            tokenizers = tokenizers_of(baseline)
            logger.info(f"Using the tokenizers of {baseline}.")
        else:
            logger.info(f"Training the {'joint ' if section.joint else ''}{section.kind} tokenizer.")
            tokenizers = trained_tokenizers(recipe.data, section)
        keep_tokenizers(tokenizers, output_dir)
    return tokenizers


def kept_tokenizers(output_dir: Path) -> TokenizerPair | None:
    """Load the tokenizers that [`keep_tokenizers`] wrote; `None` if there are none."""
    if not (output_dir / SOURCE_TOKENIZER).is_dir():
        return None
    return TokenizerPair.load(output_dir, source_subfolder=SOURCE_TOKENIZER)


def keep_tokenizers(tokenizers: TokenizerPair, output_dir: Path) -> None:
    """
    Write tokenizers into the output folder. The source's folder is moved into place last: if it exists, both tokenizers
    are complete.
    """
    forget_tokenizers(output_dir)
    working = output_dir / PARTIAL_TOKENIZERS
    tokenizers.save(working, source_subfolder=SOURCE_TOKENIZER)
    if not tokenizers.is_joint:
        os.replace(working / TARGET_TOKENIZER, output_dir / TARGET_TOKENIZER)
    os.replace(working / SOURCE_TOKENIZER, output_dir / SOURCE_TOKENIZER)
    working.rmdir()


def forget_tokenizers(output_dir: Path) -> None:
    """Delete the tokenizers in the output folder; the source's folder is renamed first."""
    working = output_dir / PARTIAL_TOKENIZERS
    shutil.rmtree(working, ignore_errors=True)
    if (output_dir / SOURCE_TOKENIZER).is_dir():
        os.replace(output_dir / SOURCE_TOKENIZER, working)
        shutil.rmtree(working)
    shutil.rmtree(output_dir / TARGET_TOKENIZER, ignore_errors=True)


def trained_tokenizers(data: DataSection, section: TokenizerSection) -> TokenizerPair:
    """Train tokenizers on the training corpora."""

    def texts(side: str) -> Iterator[str]:
        pairs: Iterator[SentencePair] = pairs_of(data.train, data.source_lang, data.target_lang, data.on_empty)
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
    """Load the tokenizers of a trained model or a checkpoint."""
    model = str(model)
    if looks_local(model) and not (Path(model) / "config.json").is_file():
        raise MissingFileError(
            "recipe.missing_file", field="model.init_from", value=model, content="model", file="config.json"
        )
    tokenizers = TokenizerPair.load(model)
    tokenizers.require_control_tokens(model)
    return tokenizers
