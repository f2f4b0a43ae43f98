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
from ..data.sharded import ShardedDataset, ShardRecord, read_json
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
    data = plan.data
    tokenizers, trees = prepare_tokenizers(data, checkpoint, processes.on_main)
    prepare: Callable[..., Dataset] = partial(
        prepare_dataset,
        source_tokenizer=tokenizers.source,
        target_tokenizer=tokenizers.target,
        cache_dir=data.cache_dir or plan.output_dir / DATA,
        trees=trees,
        **data.reading,
    )
    # Validation pairs are limited only by the model's positions.
    positions = data.model.fields.get("max_position_embeddings", 1024) - 1
    least = 0 if data.reading["on_long"] == "truncate" else positions
    longest = {name: max(data.limits[name], least) for name in ("max_source_length", "max_target_length")}

    def training_data() -> Dataset | ShardedDataset:
        if data.prepared is not None:
            return load_shards(data, tokenizers, trees)
        temperature, parts = data.mixture.temperature, [[corpus] for corpus in data.train]
        if temperature is None or len(parts) == 1:
            return prepare(data.train, **data.limits)
        return mix([prepare(part, **data.limits) for part in parts], temperature, plan.arguments.seed)

    validation = processes.main_first(partial(prepare, data.validation, keep_text=True, **longest))
    return Inputs(tokenizers, processes.main_first(training_data), validation)


def mix(parts: Sequence[Dataset], temperature: float, seed: int) -> Dataset:
    """Draw from corpora by `size ** (1 / temperature)` until all pairs are drawn (Arivazhagan et al., 2019, 4.2)."""
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
    """Load the tokenizers, or train them on the first process; return them, and the encoder of trees, if any."""
    start, field = data.model.init_from, ""
    if checkpoint is not None:
        tokenizers = load_tokenizers(checkpoint)
    elif data.prepared is not None:
        tokenizers, field = TokenizerPair.load(data.prepared, source_subfolder=SOURCE_TOKENIZER), "data.prepared"
    elif data.tokenizers:
        given = [load_tokenizer(folder) for folder in data.tokenizers]
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
    sides = [("source", "target")] if len(data.vocabularies) == 1 else [("source",), ("target",)]
    logger.info(f"Training the {'joint ' * (len(sides) == 1)}{data.vocabularies[0]['kind']} tokenizer.")
    corpora = [replace(corpus, source_tag=None, target_tag=None) for corpus in data.train]
    trained = []
    for names, settings in zip(sides, data.vocabularies, strict=True):
        pairs = load_pairs(corpora, data.source_lang, data.target_lang, data.reading["on_empty"])
        pairs = islice(pairs, data.tokenizer_settings["max_sentences"])
        trained.append(train_tokenizer((str(getattr(pair, name)) for pair in pairs for name in names), **settings))
    return TokenizerPair(trained[0], trained[-1])


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


def load_shards(data: Preparation, tokenizers: TokenizerPair, trees: TreeEncoder | None) -> ShardedDataset:
    """Load training data in shards. `UserError` if it was prepared with another recipe or other tokenizers."""
    section, own, folder = data.shards, data.tokenizer_settings, str(data.prepared)
    shards = ShardedDataset(folder, data.mixture)
    manifest, made = shards.manifest, read_json(Path(folder) / TOKENIZER_SECTION) or own
    old: dict[str, Any] = {"dependency trees": manifest.get("trees"), "tokenizers": manifest["tokenizers"]}
    new: dict[str, Any] = {"dependency trees": trees and trees.fingerprint(), "tokenizers": fingerprints(tokenizers)}
    for values, settings, tokenizer, corpora in (
        (old, manifest["settings"], made, [masked(corpus) for corpus, _ in manifest["corpora"]]),
        (new, asdict(section), own, [corpus.identity() for corpus in data.train]),
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
    """Return fingerprints, which differ between tokenizers that encode text differently."""
    return list(map(tokenizer_fingerprint, tokenizers))


def prepare_in_shards(recipe: Recipe, output: Path, workers: int, part: tuple[int, int]) -> dict[str, Any] | None:
    """Prepare training data in shards ([`~recnmt_hf.data.prepare_shards`]), with tokenizers, trained if necessary."""
    output.mkdir(parents=True, exist_ok=True)
    reject_model_folder(output)
    data = Preparation.of(recipe)
    settings = data.tokenizer_settings
    with lock(output / ".lock", 24 * 3600):  # another part trains the tokenizers
        earlier, is_complete = read_json(output / TOKENIZER_SECTION), (output / SOURCE_TOKENIZER).is_dir()
        # A preparation that failed before it had tokenizers may be repeated with others.
        has_others = is_complete and earlier != settings
        if has_others or (earlier is None and any(not path.name.startswith(".") for path in output.iterdir())):
            what = "other files" if earlier is None else "data prepared with other tokenizer settings"
            raise ExistingFileError(f"{output} has {what}. Use another folder.", field=output)
        with open_output(output / TOKENIZER_SECTION) as file:
            json.dump(settings, file, indent=1)
        tokenizers, trees = prepare_tokenizers(replace(data, prepared=str(output) if is_complete else None))
        if not is_complete:
            for name in (TARGET_TOKENIZER, RELATIONS_FILE):  # of a preparation that was killed
                remove(output / name)
            tokenizers.save_beside_source(output)
            with replacing(output / SOURCE_TOKENIZER) as folder:
                tokenizers.source.save_pretrained(str(folder))

    def report(shard: ShardRecord) -> None:
        logger.info(f"Shard {shard.name}: {shard.pairs} of {shard.read} pairs.")

    options: dict[str, Any] = {"workers": workers, "part": part, "trees": trees, "on_shard": report}
    return prepare_shards(data.train, tokenizers, output, data.shards, **options)
