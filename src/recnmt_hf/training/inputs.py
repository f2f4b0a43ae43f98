"""Inputs of a run: tokenizers, training data and validation data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, interleave_datasets

from ..data.corpora import load_pairs
from ..data.files import lock, open_output, reject_model_folder, remove, replacing
from ..data.prepared import prepare_dataset, tokenizer_fingerprint
from ..data.sharded import ShardedDataset, ShardRecord, read_json
from ..data.sharding import prepare_shards
from ..data.tokenization import check_known, load_tokenizer, require_control_tokens, train_tokenizer
from ..data.tokenizer_pair import TokenizerPair
from ..data.tree_inputs import RELATIONS_FILE, Relations, TreeEncoder, tree_options
from ..errors import ExistingFileError, UserError, short_repr
from ..models.user_errors import masked
from .building import Architecture, stage_configs
from .output_folder import DATA, PARTIAL_TOKENIZERS, SOURCE_TOKENIZER, TOKENIZER_FILES
from .plan import Plan, Preparation
from .processes import logger
from .recipe import Recipe


# File of the section `tokenizer` with which the tokenizers of data in shards were made.
TOKENIZER_SECTION = "tokenizer_section.json"


@dataclass(frozen=True)
class Inputs:
    """Tokenizers and prepared data of a run."""

    tokenizers: TokenizerPair
    train: Dataset | ShardedDataset
    validation: Dataset


def prepare_inputs(plan: Plan, checkpoint: Path | None) -> Inputs:
    """Return tokenizers, which a resumed run takes from its checkpoint, and data."""
    data = plan.data
    if checkpoint is not None:
        tokenizers = load_tokenizers(checkpoint)
    elif data.prepared is None:
        tokenizers = prepare_tokenizers(data, plan.output_dir)
    else:
        tokenizers = TokenizerPair.load(data.prepared, source_subfolder=SOURCE_TOKENIZER)
        check_baseline(data, tokenizers, "data.prepared")
    fit_to_corpora(data, tokenizers)
    trees = prepare_trees(data, tokenizers)
    prepare: Callable[..., Dataset] = partial(
        prepare_dataset,
        source_tokenizer=tokenizers.source,
        target_tokenizer=tokenizers.target,
        cache_dir=data.cache_dir or plan.output_dir / DATA,
        trees=trees,
        **data.reading,
    )
    # Validation pairs are limited only by the model's positions.
    positions = plan.data.model.fields.get("max_position_embeddings", 1024) - 1
    least = 0 if data.reading["on_long"] == "truncate" else positions
    longest = {name: max(data.limits[name], least) for name in ("max_source_length", "max_target_length")}
    validation = prepare(data.validation, keep_text=True, **longest)
    train: Dataset | ShardedDataset
    if data.prepared is not None:
        train = load_shards(data, tokenizers, trees)
    elif data.mixture.temperature is None or len(data.train) == 1:
        train = prepare(data.train, **data.limits)
    else:
        train = mix([prepare([corpus], **data.limits) for corpus in data.train], data.mixture.temperature, data.seed)
    return Inputs(tokenizers, train, validation)


def check_baseline(data: Preparation, tokenizers: TokenizerPair, field: str) -> None:
    """Raise `UserError` if the model of a warm start has other tokenizers than `field` gives."""
    start = data.model.init_from
    if start is not None and fingerprints(tokenizers) != fingerprints(load_tokenizers(start)):
        raise UserError(f"{field} has other tokenizers than model.init_from={start}.", field=field)


def fit_to_corpora(data: Preparation, tokenizers: TokenizerPair) -> None:
    """Set the languages of tokenizers with tokens of languages to those of the first corpus, and check tags."""
    languages: dict[str, str | None] = {}
    for place, corpus in data.places:
        own = corpus.language_columns(data.source_lang, data.target_lang, tokenizers)
        languages = languages or own
        for name, tokenizer in zip(("source_tag", "target_tag"), tokenizers, strict=True):
            if (tag := getattr(corpus, name)) is not None:
                check_known(tokenizer, tag, f"{place}.{name}", is_target=name == "target_tag")
    for name, code, tokenizer in zip(("src_lang", "tgt_lang"), languages.values(), tokenizers, strict=False):
        if code is not None:
            setattr(tokenizer, name, code)


def load_shards(data: Preparation, tokenizers: TokenizerPair, trees: TreeEncoder | None) -> ShardedDataset:
    """Load training data in shards. `UserError` if it was prepared with another recipe or other tokenizers."""
    shards = ShardedDataset(str(data.prepared), data.mixture)
    manifest = shards.manifest
    made = read_json(Path(str(data.prepared)) / TOKENIZER_SECTION) or data.tokenizer_settings
    old: dict[str, Any] = {"dependency trees": manifest.get("trees"), "tokenizers": manifest["tokenizers"]}
    new: dict[str, Any] = {"dependency trees": trees and trees.fingerprint(), "tokenizers": fingerprints(tokenizers)}
    for values, settings, section, corpora in (
        (old, manifest["settings"], made, [masked(corpus) for corpus, _ in manifest["corpora"]]),
        (new, asdict(data.shards), data.tokenizer_settings, [corpus.identity() for corpus in data.train]),
    ):
        values |= {f"data.{name}": settings.get(name) for name in asdict(data.shards)}
        values |= {f"tokenizer.{name}": section.get(name) for name in data.tokenizer_settings}
        values["number of corpora in data.train"] = len(corpora)
        for number, corpus in enumerate(corpora):
            values |= {f"data.train[{number}].{name}": value for name, value in corpus.items()}
    if changes := changes_of(old, new):
        reason = "was prepared with another recipe; these differ (prepared -> recipe)"
        raise UserError(f"data.prepared {reason}: {'; '.join(changes.values())}.", field="data.prepared")
    return shards


def changes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return a description of each value that differs, by name."""
    return {
        name: f"{name}: {short_repr(old.get(name))} -> {short_repr(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def fingerprints(tokenizers: TokenizerPair) -> list[str]:
    """Return what tells apart tokenizers that encode text differently."""
    return list(map(tokenizer_fingerprint, tokenizers))


def prepare_in_shards(
    recipe: Recipe, output: Path, workers: int, part: tuple[int, int], on_shard: Callable[[ShardRecord], None]
) -> dict[str, Any] | None:
    """
    Prepare the training data of a recipe in shards ([`~recnmt_hf.data.prepare_shards`]), with its tokenizers, which are
    trained first if necessary. `UserError` if the folder has data of another recipe.
    """
    output.mkdir(parents=True, exist_ok=True)
    reject_model_folder(output)
    data = Preparation.of(recipe, Architecture(**asdict(recipe.model)))
    with lock(output / ".lock", 24 * 3600):  # another part trains the tokenizers
        earlier = read_json(output / TOKENIZER_SECTION)
        # A preparation that failed before it had tokenizers may be repeated with others.
        has_others = (output / SOURCE_TOKENIZER).is_dir() and earlier != data.tokenizer_settings
        if has_others or (earlier is None and any(not path.name.startswith(".") for path in output.iterdir())):
            what = "other files" if earlier is None else "data that was prepared with other tokenizer settings"
            raise ExistingFileError(f"{output} has {what}.", field=output)
        with open_output(output / TOKENIZER_SECTION) as file:
            json.dump(data.tokenizer_settings, file, indent=1)
        tokenizers = prepare_tokenizers(data, output)
        fit_to_corpora(data, tokenizers)
        trees = prepare_trees(data, tokenizers)
        if not (output / SOURCE_TOKENIZER).is_dir() or (trees and not (output / RELATIONS_FILE).is_file()):
            save_tokenizers(tokenizers, output)
    return prepare_shards(
        data.train, tokenizers, output, data.shards, workers=workers, part=part, trees=trees, on_shard=on_shard
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


def prepare_tokenizers(data: Preparation, output_dir: Path) -> TokenizerPair:
    """Load or train the tokenizers. A warm start uses those of its baseline."""
    if data.tokenizers:
        given = [load_tokenizer(folder) for folder in data.tokenizers]
        tokenizers = TokenizerPair(given[0], given[-1])
        check_baseline(data, tokenizers, "tokenizer.source")
        return tokenizers
    if (output_dir / SOURCE_TOKENIZER).is_dir():
        return TokenizerPair.load(output_dir, source_subfolder=SOURCE_TOKENIZER)
    if data.model.init_from:
        tokenizers = load_tokenizers(data.model.init_from)
        logger.info(f"Using the tokenizers of {data.model.init_from}.")
    else:
        is_joint = len(data.vocabularies) == 1
        logger.info(f"Training the {'joint ' if is_joint else ''}{data.vocabularies[0]['kind']} tokenizer.")
        corpora = [replace(corpus, source_tag=None, target_tag=None) for corpus in data.train]
        trained, most = [], data.tokenizer_settings["max_sentences"]
        for sides, settings in zip(
            [("source", "target")] if is_joint else [("source",), ("target",)], data.vocabularies, strict=True
        ):
            pairs = load_pairs(corpora, data.source_lang, data.target_lang, data.reading["on_empty"])
            texts = (str(getattr(pair, side)) for pair in islice(pairs, most) for side in sides)
            trained.append(train_tokenizer(texts, **settings))
        tokenizers = TokenizerPair(trained[0], None if is_joint else trained[1])
    save_tokenizers(tokenizers, output_dir)
    return tokenizers


def prepare_trees(data: Preparation, tokenizers: TokenizerPair) -> TreeEncoder | None:
    """Return the encoder of dependency trees, or `None` if the model or the training data has none."""
    if tree_options(stage_configs(data.model, tokenizers)[-1]) is None:
        return None
    if not any(corpus.has_trees for corpus in data.train):
        reason = "The model reads dependency trees, but data.train has none. Set source_trees or tree_columns"
        logger.warning(f"Warning: {reason}, or on several processes training.ddp_find_unused_parameters=true.")
        return None
    if tokenizers.relations is None:
        pairs = load_pairs(data.train, data.source_lang, data.target_lang, data.reading["on_empty"])
        subtypes = data.tokenizer_settings["relation_subtypes"]
        tokenizers.relations = Relations.count((pair.source for pair in pairs), subtypes)
        logger.info(f"{len(tokenizers.relations)} relations of dependency trees.")
    if without := [place for place, corpus in data.places if not corpus.has_trees]:
        logger.warning(f"Warning: {', '.join(without)} have no dependency trees; sources are read without them.")
    return tokenizers.tree_encoder(stage_configs(data.model, tokenizers)[-1])


def save_tokenizers(tokenizers: TokenizerPair, output_dir: Path) -> None:
    """Write tokenizers into the output folder, the source's last: if its folder exists, all is complete."""
    delete_tokenizers(output_dir)
    tokenizers.save_beside_source(output_dir)
    with replacing(output_dir / SOURCE_TOKENIZER) as folder:
        tokenizers.source.save_pretrained(str(folder))


def delete_tokenizers(output_dir: Path) -> None:
    """Delete the tokenizers in the output folder, with the relations; the source's folder is renamed first."""
    remove(output_dir / PARTIAL_TOKENIZERS)
    if (output_dir / SOURCE_TOKENIZER).is_dir():
        os.replace(output_dir / SOURCE_TOKENIZER, output_dir / PARTIAL_TOKENIZERS)
    for name in (PARTIAL_TOKENIZERS, *TOKENIZER_FILES):
        remove(output_dir / name)


def load_tokenizers(model: str | Path) -> TokenizerPair:
    """Load the tokenizers of a trained model or a checkpoint."""
    tokenizers = TokenizerPair.load(model)
    for tokenizer in dict.fromkeys(tokenizers):
        require_control_tokens(tokenizer, model)
    return tokenizers
