"""Inputs of a run: tokenizers, training data and validation data."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, interleave_datasets
from transformers import PreTrainedTokenizerBase

from ..data.corpora import Corpus, load_pairs, prepare_dataset, tokenizer_fingerprint
from ..data.files import explained_preparation, open_output, reject_model_folder, remove
from ..data.locks import lock
from ..data.sharded import ShardedDataset
from ..data.sharding import ShardRecord, prepare_shards, read_json
from ..data.tags import check_known
from ..data.tokenization import load_tokenizer, require_control_tokens, train_tokenizer
from ..data.tokenizer_pair import TARGET_TOKENIZER, TokenizerPair
from ..data.tree_inputs import RELATIONS_FILE, Relations, TreeEncoder, tree_options
from ..errors import ExistingFileError, UserError, short_repr
from ..models.user_errors import masked
from .arguments import conflict
from .building import stage_configs
from .processes import logger
from .recipe import DataSection, Recipe, TokenizerSection


# Folder of prepared data in the output folder.
DATA = "data"
SOURCE_TOKENIZER = "tokenizer"
PARTIAL_TOKENIZERS = "tokenizers.partial"
# Files and folders of the tokenizers there, in the order in which they are written.
TOKENIZER_FILES = (RELATIONS_FILE, TARGET_TOKENIZER, SOURCE_TOKENIZER)
# File of the section `tokenizer` with which the tokenizers of data in shards were made.
TOKENIZER_SECTION = "tokenizer_section.json"


def prepare_inputs(
    recipe: Recipe, output_dir: Path, checkpoint: Path | None
) -> tuple[TokenizerPair, Dataset | ShardedDataset, Dataset]:
    """Return the tokenizers, which a resumed run takes from its checkpoint, and the training and validation data."""
    data = recipe.data
    if checkpoint is not None:
        tokenizers = load_tokenizers(checkpoint)
    else:
        tokenizers = prepare_tokenizers(recipe, output_dir) if data.prepared is None else load_with_shards(recipe)
    fit_to_corpora(recipe, tokenizers)
    trees = prepare_trees(recipe, tokenizers)
    prepare: Callable[..., Dataset] = partial(
        prepare_dataset,
        source_tokenizer=tokenizers.source,
        target_tokenizer=tokenizers.target,
        cache_dir=data.cache_dir or output_dir / DATA,
        trees=trees,
        **{name: getattr(data, name) for name in ("source_lang", "target_lang", "on_empty", "num_proc", "on_long")},
    )
    longest = {name: getattr(data, name) for name in ("max_source_length", "max_target_length")}
    # Validation pairs are limited only by the model's positions.
    least = 0 if data.on_long == "truncate" else recipe.model.fields.get("max_position_embeddings", 1024) - 1
    longest_validation = {name: max(length, least) for name, length in longest.items()}
    validation = prepare(data.validation, keep_text=True, **longest_validation)
    if data.prepared is not None:
        return tokenizers, load_shards(recipe, tokenizers, trees), validation
    corpora = training_corpora(recipe)
    if data.temperature is None or len(corpora) == 1:
        train = prepare(corpora, max_length_ratio=data.max_length_ratio, **longest)
    else:
        parts = [prepare([corpus], max_length_ratio=data.max_length_ratio, **longest) for corpus in corpora]
        train = mix(parts, data.temperature, recipe.training.seed)
    return tokenizers, train, validation


def fit_to_corpora(recipe: Recipe, tokenizers: TokenizerPair) -> None:
    """
    Set the languages of tokenizers that name languages by tokens to those of the first training corpus, the default of
    the trained model. `UserError` for an unknown language, or a tag that is not one symbol of its tokenizer.
    """
    languages: dict[str, str | None] = {}
    for place, corpus in recipe.corpora:
        try:
            own = corpus.language_columns(recipe.data.source_lang, recipe.data.target_lang, tokenizers)
        except UserError as error:
            raise error.inside(place if getattr(corpus, str(error.field)) else "data") from None
        languages = languages or own
        for name, tokenizer in zip(("source_tag", "target_tag"), tokenizers, strict=True):
            if (tag := getattr(corpus, name)) is not None:
                check_known(tokenizer, tag, f"{place}.{name}", is_target=name == "target_tag")
    for name, code, tokenizer in zip(("src_lang", "tgt_lang"), languages.values(), tokenizers, strict=False):
        if code is not None:
            setattr(tokenizer, name, code)


def load_with_shards(recipe: Recipe) -> TokenizerPair:
    """Load the tokenizers of data in shards. `UserError` if a warm start's baseline has others."""
    folder = str(recipe.data.prepared)
    tokenizers = TokenizerPair.load(folder, source_subfolder=SOURCE_TOKENIZER)
    if recipe.model.init_from is not None:
        baseline = load_tokenizers(recipe.model.init_from)
        if have_other_symbols(tokenizers, baseline):
            changes = f"tokenizers (model.init_from={recipe.model.init_from} has others)"
            raise UserError(
                f"data.prepared was prepared with another recipe; these differ (prepared -> recipe): {changes}.",
                field="data.prepared",
            )
    return tokenizers


def load_shards(recipe: Recipe, tokenizers: TokenizerPair, trees: TreeEncoder | None) -> ShardedDataset:
    """Load training data in shards. `UserError` if it was prepared with another recipe or other tokenizers."""
    folder = str(recipe.data.prepared)
    data = ShardedDataset(folder, recipe.data.mixture)
    prepared = data.manifest
    settings = asdict(recipe.data.shard_settings)
    before = [masked(corpus) for corpus, _ in prepared["corpora"]]
    now = [corpus.identity() for corpus in training_corpora(recipe)]
    pairs = [(f"data.{name}", prepared["settings"].get(name), value) for name, value in settings.items()]
    pairs.append(("number of corpora in data.train", len(before), len(now)))
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        pairs += [(f"data.train[{number}].{name}", old.get(name), new.get(name)) for name in old | new]
    section = section_of_data(recipe)
    made = read_json(Path(folder) / TOKENIZER_SECTION) or section
    pairs += [(f"tokenizer.{name}", made.get(name), value) for name, value in section.items()]
    pairs.append(("dependency trees", prepared.get("trees"), None if trees is None else trees.fingerprint()))
    changes = [f"{name}: {short_repr(old)} -> {short_repr(new)}" for name, old, new in pairs if old != new]
    if prepared["tokenizers"] != list(map(tokenizer_fingerprint, tokenizers)):
        changes.append("tokenizers")
    if changes:
        raise UserError(
            f"data.prepared was prepared with another recipe; these differ (prepared -> recipe): {'; '.join(changes)}.",
            field="data.prepared",
        )
    return data


def have_other_symbols(tokenizers: TokenizerPair, others: TokenizerPair) -> bool:
    """Return whether tokenizers encode text differently than others."""
    return list(map(tokenizer_fingerprint, tokenizers)) != list(map(tokenizer_fingerprint, others))


def section_of_data(recipe: Recipe) -> dict[str, Any]:
    """Return the section `tokenizer` without what is for training alone."""
    return asdict(replace(recipe.tokenizer, dropout=0.0))


def training_corpora(recipe: Recipe) -> list[Corpus]:
    """Return the training corpora, with their links only if the run uses them."""
    if recipe.guides_alignment:
        return recipe.data.train
    return [replace(corpus, alignments=None) if corpus.alignments else corpus for corpus in recipe.data.train]


def prepare_in_shards(
    recipe: Recipe, output: Path, workers: int, part: tuple[int, int], on_shard: Callable[[ShardRecord], None]
) -> dict[str, Any] | None:
    """
    Prepare the training data of a recipe in shards ([`~recnmt_hf.data.prepare_shards`]), with its tokenizers, which are
    trained first if necessary. `UserError` if the folder has data of another recipe.
    """
    with explained_preparation(output):
        output.mkdir(parents=True, exist_ok=True)
        reject_model_folder(output)
    with lock(output / ".lock", 24 * 3600):  # another part trains the tokenizers
        others = [path for path in output.iterdir() if not path.name.startswith(".")]
        if not (output / TOKENIZER_SECTION).exists() and others:
            raise ExistingFileError(f"{output} is not empty.", field=output)
        section = section_of_data(recipe)
        earlier = read_json(output / TOKENIZER_SECTION)
        # A preparation that failed before it had tokenizers may be repeated with others.
        if earlier is not None and earlier != section and (output / SOURCE_TOKENIZER).is_dir():
            raise UserError(f"{output} has data that was prepared with other tokenizer settings.", field=output)
        with open_output(output / TOKENIZER_SECTION) as file:
            json.dump(section, file, indent=1)
        tokenizers = prepare_tokenizers(recipe, output)
        fit_to_corpora(recipe, tokenizers)
        trees = prepare_trees(recipe, tokenizers)
        if not (output / SOURCE_TOKENIZER).is_dir() or (trees and not (output / RELATIONS_FILE).is_file()):
            save_tokenizers(tokenizers, output)
    return prepare_shards(
        training_corpora(recipe),
        tokenizers,
        output,
        recipe.data.shard_settings,
        workers=workers,
        part=part,
        trees=trees,
        on_shard=on_shard,
    )


def mix(parts: Sequence[Dataset], temperature: float, seed: int) -> Dataset:
    """
    Draw pairs from prepared corpora until each pair of each corpus was drawn, with probabilities proportional to
    `size ** (1 / temperature)` (Arivazhagan et al., 2019, section 4.2).
    """
    weights = [len(part) ** (1 / temperature) for part in parts]
    probabilities = [weight / sum(weights) for weight in weights]
    marked = [part.add_column("corpus", [number] * len(part)) for number, part in enumerate(parts)]
    if kind := next((part.features["links"] for part in parts if "links" in part.column_names), None):
        for number, part in enumerate(marked):
            if "links" not in part.column_names:  # of a corpus without alignments
                marked[number] = part.add_column("links", [[]] * len(part), feature=kind)
    return interleave_datasets(marked, probabilities, seed=seed, stopping_strategy="all_exhausted")


def prepare_tokenizers(recipe: Recipe, output_dir: Path) -> TokenizerPair:
    """Load or train the tokenizers. A warm start uses those of its baseline."""
    section, baseline = recipe.tokenizer, recipe.model.init_from
    if section.source:
        source = load_tokenizer(section.source)
        target = None if section.joint else load_tokenizer(section.target or section.source)
        tokenizers = TokenizerPair(source, target)
        if baseline is not None and have_other_symbols(tokenizers, load_tokenizers(baseline)):
            other = f"model.init_from={baseline}, a model with other tokenizers"
            raise conflict("tokenizer.source", section.source, other, "remove it, to use those of the model")
        return tokenizers
    if (output_dir / SOURCE_TOKENIZER).is_dir():
        return TokenizerPair.load(output_dir, source_subfolder=SOURCE_TOKENIZER)
    if baseline:
        tokenizers = load_tokenizers(baseline)
        logger.info(f"Using the tokenizers of {baseline}.")
    else:
        logger.info(f"Training the {'joint ' if section.joint else ''}{section.kind} tokenizer.")
        tokenizers = train_tokenizers(recipe.data, section)
    save_tokenizers(tokenizers, output_dir)
    return tokenizers


def prepare_trees(recipe: Recipe, tokenizers: TokenizerPair) -> TreeEncoder | None:
    """
    Return the encoder of dependency trees, or `None` if the model reads none or the training data has none. Relations
    are added to the tokenizers, unless they come with those of a trained model. `UserError` if several processes train
    without trees.
    """
    data = recipe.data
    if tree_options(stage_configs(recipe.model, tokenizers)[-1]) is None:
        return None
    if not any(corpus.has_trees for corpus in data.train):
        finds_unused = recipe.training.ddp_find_unused_parameters  # those without gradients
        if PartialState().num_processes > 1 and not finds_unused:
            raise UserError(
                "data.train has no dependency trees, but training this model on several processes requires them. Set "
                "source_trees or tree_columns, or training.ddp_find_unused_parameters=true.",
                field="data.train",
            )
        logger.warning(
            "Warning: the model reads dependency trees, but data.train has none, so it is trained without them. "
            "Set source_trees or tree_columns."
        )
        return None
    if tokenizers.relations is None:
        pairs = load_pairs(data.train, data.source_lang, data.target_lang, data.on_empty)
        tokenizers.relations = Relations.count((pair.source for pair in pairs), recipe.tokenizer.relation_subtypes)
        logger.info(f"{len(tokenizers.relations)} relations of dependency trees.")
    if places := [place for place, corpus in recipe.corpora if not corpus.has_trees]:
        logger.warning(f"Warning: {', '.join(places)} have no dependency trees; sources are read without them.")
    return tokenizers.tree_encoder(stage_configs(recipe.model, tokenizers)[-1])


def save_tokenizers(tokenizers: TokenizerPair, output_dir: Path) -> None:
    """Write tokenizers into the output folder, the source's last: if its folder exists, all is complete."""
    delete_tokenizers(output_dir)
    working = output_dir / PARTIAL_TOKENIZERS
    tokenizers.save(working, source_subfolder=SOURCE_TOKENIZER)
    for name in TOKENIZER_FILES:
        if (working / name).exists():
            os.replace(working / name, output_dir / name)
    working.rmdir()


def delete_tokenizers(output_dir: Path) -> None:
    """Delete the tokenizers in the output folder, with the relations; the source's folder is renamed first."""
    working = output_dir / PARTIAL_TOKENIZERS
    shutil.rmtree(working, ignore_errors=True)
    if (output_dir / SOURCE_TOKENIZER).is_dir():
        os.replace(output_dir / SOURCE_TOKENIZER, working)
        shutil.rmtree(working)
    for name in TOKENIZER_FILES:
        remove(output_dir / name)


def train_tokenizers(data: DataSection, section: TokenizerSection) -> TokenizerPair:
    """Train tokenizers on the training corpora."""

    def train(sides: tuple[str, ...], kind: str, vocab_size: int) -> PreTrainedTokenizerBase:
        corpora = [replace(corpus, source_tag=None, target_tag=None) for corpus in data.train]
        pairs = load_pairs(corpora, data.source_lang, data.target_lang, data.on_empty)
        return train_tokenizer(
            (str(getattr(pair, side)) for pair in islice(pairs, section.max_sentences) for side in sides),
            kind,
            vocab_size,
            min_frequency=section.min_frequency,
            lowercase=section.lowercase,
            byte_fallback=section.byte_fallback if kind == "bpe" else None,
            tags=section.tags,
        )

    if section.joint:
        return TokenizerPair(train(("source", "target"), section.kind, section.vocab_size))
    source = train(("source",), section.kind, section.vocab_size)
    target_size = section.target_vocab_size or section.vocab_size
    return TokenizerPair(source, train(("target",), section.target_kind or section.kind, target_size))


def load_tokenizers(model: str | Path) -> TokenizerPair:
    """Load the tokenizers of a trained model or a checkpoint."""
    tokenizers = TokenizerPair.load(model)
    for tokenizer in dict.fromkeys(tokenizers):
        require_control_tokens(tokenizer, model)
    return tokenizers
