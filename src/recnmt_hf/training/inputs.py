"""Inputs of a run: tokenizers, training data and validation data."""

import json
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
from ..data.sharded import Mixture, ShardedDataset, ShardRecord, read_json
from ..data.sharding import prepare_shards
from ..data.tokenization import check_known, load_tokenizer, require_control_tokens, train_tokenizer
from ..data.tokenizer_pair import TARGET_TOKENIZER, TokenizerPair
from ..data.tree_inputs import RELATIONS_FILE, Relations, TreeEncoder, tree_options
from ..errors import ExistingFileError, UserError, short_repr
from ..models.user_errors import masked
from .building import stage_configs
from .checkpoints import DATA
from .plan import Plan, Preparation
from .processes import Processes, logger
from .recipe import Recipe


# Of data in shards: the folder of the source's tokenizer, and the section `tokenizer` with which tokenizers were made.
SOURCE_TOKENIZER, TOKENIZER_SECTION = "tokenizer", "tokenizer_section.json"


@dataclass(frozen=True)
class Inputs:
    """Tokenizers and prepared data of a run."""

    tokenizers: TokenizerPair
    train: Dataset | ShardedDataset
    validation: Dataset


def prepare_inputs(plan: Plan, checkpoint: Path | None, processes: Processes) -> Inputs:
    """Return tokenizers, which a resumed run takes from its checkpoint, and data; the first process makes both."""
    data = plan.data.section
    tokenizers, trees = prepare_tokenizers(plan.data, checkpoint, processes.on_main)
    names = ("source_lang", "target_lang", "on_empty", "num_proc", "on_long")
    prepare: Callable[..., Dataset] = partial(
        prepare_dataset,
        source_tokenizer=tokenizers.source,
        target_tokenizer=tokenizers.target,
        cache_dir=data.cache_dir or plan.output_dir / DATA,
        trees=trees,
        **{name: getattr(data, name) for name in names},
    )
    lengths = {name: getattr(data, name) for name in ("max_source_length", "max_target_length")}
    # Validation pairs are limited only by the model's positions.
    positions = plan.data.model.fields.get("max_position_embeddings", 1024) - 1
    longest = {name: max(value, 0 if data.on_long == "truncate" else positions) for name, value in lengths.items()}

    def training_data() -> Dataset | ShardedDataset:
        if data.prepared is not None:
            return load_shards(plan.data, tokenizers, trees)
        limits = {**lengths, "max_length_ratio": data.max_length_ratio}
        if data.temperature is None or len(data.train) == 1:
            return prepare(data.train, **limits)
        return mix([prepare([corpus], **limits) for corpus in data.train], data.temperature, plan.arguments.seed)

    validation = processes.main_first(partial(prepare, data.validation, keep_text=True, **longest))
    return Inputs(tokenizers, processes.main_first(training_data), validation)


def mix(parts: Sequence[Dataset], temperature: float, seed: int) -> Dataset:
    """Draw pairs, until each was drawn, by `size ** (1 / temperature)` (Arivazhagan et al., 2019, section 4.2)."""
    weights = [len(part) ** (1 / temperature) for part in parts]
    probabilities = [weight / sum(weights) for weight in weights]
    marked = [part.add_column("corpus", [number] * len(part)) for number, part in enumerate(parts)]
    if kind := next((part.features["links"] for part in parts if "links" in part.column_names), None):
        for number, part in enumerate(marked):
            if "links" not in part.column_names:  # of a corpus without alignments
                marked[number] = part.add_column("links", [[]] * len(part), feature=kind)
    return interleave_datasets(marked, probabilities, seed=seed, stopping_strategy="all_exhausted")


def prepare_tokenizers(
    data: Preparation, checkpoint: Path | None = None, on_main: Callable[..., Any] = lambda work: work()
) -> tuple[TokenizerPair, TreeEncoder | None]:
    """Load the tokenizers, or train them `on_main`, the first process; return them, and an encoder of trees if any."""
    start, field = data.model.init_from, ""
    if checkpoint is not None:
        tokenizers = load_tokenizers(checkpoint)
    elif (prepared := data.section.prepared) is not None:
        tokenizers, field = TokenizerPair.load(prepared, source_subfolder=SOURCE_TOKENIZER), "data.prepared"
    elif data.tokenizer.existing:
        given = [load_tokenizer(folder) for folder in data.tokenizer.existing]
        tokenizers, field = TokenizerPair(given[0], given[-1]), "tokenizer.source"
    elif start is not None:
        tokenizers = load_tokenizers(start)
        logger.info(f"Using the tokenizers of {start}.")
    else:
        tokenizers = on_main(partial(train_tokenizers, data))
    if field and start is not None and fingerprints(tokenizers) != fingerprints(load_tokenizers(start)):
        raise UserError(f"{field} has other tokenizers than model.init_from={start}.", field=field)
    fit_to_corpora(data, tokenizers)
    return tokenizers, prepare_trees(data, tokenizers)


def load_tokenizers(model: str | Path) -> TokenizerPair:
    """Load the tokenizers of a trained model or a checkpoint."""
    tokenizers = TokenizerPair.load(model)
    for tokenizer in dict.fromkeys(tokenizers):
        require_control_tokens(tokenizer, model)
    return tokenizers


def train_tokenizers(data: Preparation) -> TokenizerPair:
    """Train a tokenizer for both sides, or one for each, on text without tags."""
    section, tokenizer = data.section, data.tokenizer
    sides = [("source", "target")] if tokenizer.joint else [("source",), ("target",)]
    logger.info(f"Training the {'joint ' * tokenizer.joint}{tokenizer.kind} tokenizer.")
    corpora = [replace(corpus, source_tag=None, target_tag=None) for corpus in section.train]
    trained = []
    for names, settings in zip(sides, tokenizer.vocabularies, strict=True):
        pairs = load_pairs(corpora, section.source_lang, section.target_lang, section.on_empty)
        pairs = islice(pairs, tokenizer.max_sentences)
        trained.append(train_tokenizer((str(getattr(pair, name)) for pair in pairs for name in names), **settings))
    return TokenizerPair(trained[0], trained[-1])


def fit_to_corpora(data: Preparation, tokenizers: TokenizerPair) -> None:
    """Set the languages of tokenizers with tokens of languages to those of the first corpus, and check tags."""
    languages: dict[str, str | None] = {}
    for place, corpus in data.places:
        own = corpus.language_columns(data.section.source_lang, data.section.target_lang, tokenizers)
        languages = languages or own
        for name, tokenizer in zip(("source_tag", "target_tag"), tokenizers, strict=True):
            if (tag := getattr(corpus, name)) is not None:
                check_known(tokenizer, tag, f"{place}.{name}", is_target=name == "target_tag")
    for name, code, tokenizer in zip(("src_lang", "tgt_lang"), languages.values(), tokenizers, strict=False):
        if code is not None:
            setattr(tokenizer, name, code)


def prepare_trees(data: Preparation, tokenizers: TokenizerPair) -> TreeEncoder | None:
    """Return the encoder of dependency trees, or `None` if the model or the training data has none."""
    section = data.section
    if tree_options(stage_configs(data.model, tokenizers)[-1]) is None:
        return None
    if not any(corpus.has_trees for corpus in section.train):
        reason = "The model reads dependency trees, but data.train has none. Set source_trees or tree_columns"
        logger.warning(f"Warning: {reason}, or on several processes training.ddp_find_unused_parameters=true.")
        return None
    if tokenizers.relations is None:
        pairs = load_pairs(section.train, section.source_lang, section.target_lang, section.on_empty)
        tokenizers.relations = Relations.count((pair.source for pair in pairs), data.tokenizer.relation_subtypes)
        logger.info(f"{len(tokenizers.relations)} relations of dependency trees.")
    if without := [place for place, corpus in data.places if not corpus.has_trees]:
        logger.warning(f"Warning: {', '.join(without)} have no dependency trees; sources are read without them.")
    return tokenizers.tree_encoder(stage_configs(data.model, tokenizers)[-1])


def load_shards(data: Preparation, tokenizers: TokenizerPair, trees: TreeEncoder | None) -> ShardedDataset:
    """Load training data in shards. `UserError` if it was prepared with another recipe or other tokenizers."""
    section, own, folder = data.section.shards, data.tokenizer.settings, str(data.section.prepared)
    shards = ShardedDataset(folder, Mixture(data.section.weights, data.section.temperature))
    manifest, made = shards.manifest, read_json(Path(folder) / TOKENIZER_SECTION) or own
    old: dict[str, Any] = {"dependency trees": manifest.get("trees"), "tokenizers": manifest["tokenizers"]}
    new: dict[str, Any] = {"dependency trees": trees and trees.fingerprint(), "tokenizers": fingerprints(tokenizers)}
    for values, settings, tokenizer, corpora in (
        (old, manifest["settings"], made, [masked(corpus) for corpus, _ in manifest["corpora"]]),
        (new, asdict(section), own, [corpus.identity() for corpus in data.section.train]),
    ):
        values |= {f"data.{name}": settings.get(name) for name in asdict(section)}
        values |= {f"tokenizer.{name}": tokenizer.get(name) for name in own}
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
    """Return what tells tokenizers apart that encode text differently."""
    return list(map(tokenizer_fingerprint, tokenizers))


def prepare_in_shards(recipe: Recipe, output: Path, workers: int, part: tuple[int, int]) -> dict[str, Any] | None:
    """Prepare training data in shards ([`~recnmt_hf.data.prepare_shards`]), with tokenizers, trained if necessary."""
    output.mkdir(parents=True, exist_ok=True)
    reject_model_folder(output)
    data = Preparation.of(recipe, recipe.model)
    section, settings = data.section, data.tokenizer.settings
    with lock(output / ".lock", 24 * 3600):  # another part trains the tokenizers
        earlier, is_complete = read_json(output / TOKENIZER_SECTION), (output / SOURCE_TOKENIZER).is_dir()
        # A preparation that failed before it had tokenizers may be repeated with others.
        has_others = is_complete and earlier != settings
        if has_others or (earlier is None and any(not path.name.startswith(".") for path in output.iterdir())):
            what = "other files" if earlier is None else "data that was prepared with other tokenizer settings"
            raise ExistingFileError(f"{output} has {what}.", field=output)
        with open_output(output / TOKENIZER_SECTION) as file:
            json.dump(settings, file, indent=1)
        made = replace(section, prepared=str(output) if is_complete else None)
        tokenizers, trees = prepare_tokenizers(replace(data, section=made))
        if not is_complete:
            for name in (TARGET_TOKENIZER, RELATIONS_FILE):  # of a preparation that was killed
                remove(output / name)
            tokenizers.save_beside_source(output)
            with replacing(output / SOURCE_TOKENIZER) as folder:
                tokenizers.source.save_pretrained(str(folder))

    def report(shard: ShardRecord) -> None:
        logger.info(f"Shard {shard.name}: {shard.pairs} of {shard.read} pairs.")

    options: dict[str, Any] = {"workers": workers, "part": part, "trees": trees, "on_shard": report}
    return prepare_shards(section.train, tokenizers, output, section.shards, **options)
