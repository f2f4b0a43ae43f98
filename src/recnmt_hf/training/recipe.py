"""Recipes: a YAML file describes a training run, and is parsed once into typed sections."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from .._loading_errors import folder_of_model
from .._values import (
    DEFAULT,
    LANGUAGE,
    Range,
    check_fields,
    check_value,
    documented,
    given_fields,
    mapping,
    option,
    options_of,
    parse,
    remember_given,
    stated,
)
from ..data.corpora import Corpus, parse_corpora
from ..data.deduplication import KEYS_OF_DUPLICATES
from ..data.files import open_output
from ..data.sharded import Mixture
from ..data.sharding import ShardSettings
from ..data.tags import check_tags
from ..data.text import ON_EMPTY, ON_LONG
from ..data.tokenization import SPECIAL_TOKENS, TOKENIZER_TYPES
from ..errors import UserError, short_repr
from ..inference.options import TEXT_OPTIONS, DecodingOptions
from ..metrics.bleu import bleu_tokenizer
from .arguments import TranslationTrainingArguments, conflict, make_arguments, requirement, training_options
from .building import MOST_SYMBOLS, MOST_WIDTH, ModelSection
from .guided_alignment import GuidedAlignment
from .metrics import VALIDATION_METRICS, TextScorer, higher_is_better
from .recipe_yaml import content_of, dump_yaml


_LENGTH = Range(least=2, most=MOST_WIDTH)  # a word and the end token
_SYMBOLS = Range(least=5, most=MOST_SYMBOLS)  # one beside the special tokens


@documented
@dataclass
class DataSection:
    """Section `data`: sentence pairs. [`~recnmt_hf.data.Corpus`] lists the fields of a corpus."""

    source_lang: str = option("en", "language code of the source")
    target_lang: str = option("de", "language code of the target")
    train: list[Corpus] = field(
        default_factory=lambda: [parse(Corpus, {"generated": "train"}, "data.train[0]")],
        metadata={"help": "corpora to train on; the generated one by default"},
    )
    validation: list[Corpus] = field(
        default_factory=lambda: [parse(Corpus, {"generated": "validation"}, "data.validation[0]")],
        metadata={"help": "corpora to evaluate on during training; the generated one by default"},
    )
    on_empty: str = option("error", "treatment of pairs with an empty side", choices=ON_EMPTY)
    max_source_length: Annotated[int, _LENGTH] = option(
        256,
        "maximum number of source tokens of a training pair; validation pairs may be as long as the model's positions",
    )
    max_target_length: Annotated[int, _LENGTH] = option(256, "maximum number of target tokens of a training pair")
    on_long: str = option(
        "skip",
        "skip: leave out training pairs that are too long; truncate: truncate them, and the sources of validation and "
        "test sets",
        choices=ON_LONG,
    )
    max_length_ratio: Annotated[float | None, Range(least=1)] = option(
        None, "maximum ratio of the two lengths of a training pair"
    )
    temperature: Annotated[float | None, Range(least=1, most=1000)] = option(
        None,
        "draw pairs from the corpora of train with probabilities proportional to their size to the power of 1 / "
        "temperature, so that small corpora are repeated; null: read each pair once",
    )
    weights: list[float] | None = field(
        default=None,
        metadata={
            "help": "how often each corpus of train is read in an epoch (prepared data only); for a fraction, a fixed "
            "part of it is read"
        },
    )
    prepared: str | None = option(
        None, "folder that `recnmt prepare` wrote from this recipe; training reads its shards instead of `train`"
    )
    shard_size: Annotated[int, Range(least=1, most=10**7)] = option(
        100_000, "for `recnmt prepare`: number of lines of a corpus in a shard"
    )
    deduplicate: str | None = option(
        None,
        "for `recnmt prepare`: remove pairs that occurred before; source, target: compare only this side",
        choices=(None, *KEYS_OF_DUPLICATES),
    )
    min_language_score: Annotated[float | None, Range(least=0, most=1)] = option(
        None,
        "for `recnmt prepare`: remove pairs if the probability that a side is in its language is lower (needs the "
        "extra `filters`)",
    )
    cache_dir: str | None = option(
        None, "folder for the tokenized training data; null: a subfolder of the output folder"
    )
    num_proc: Annotated[int | None, Range(least=1, most=1024)] = option(None, "number of processes that tokenize")

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed."""
        check_fields(self, "data")
        for name in ("source_lang", "target_lang"):
            language = getattr(self, name)
            if not LANGUAGE.fullmatch(language):
                raise UserError(
                    f"data.{name}={short_repr(language)} is not a language code such as en, de or zh-CN.",
                    field=f"data.{name}",
                )
        self.check_mixture()
        for name in ("train", "validation"):
            for number, corpus in enumerate(getattr(self, name)):
                corpus.check_single_target(f"data.{name}[{number}]")

    def check_mixture(self) -> None:
        """Raise `UserError` for weights that do not match the corpora, or that cannot be used."""
        if self.weights is None:
            return
        if self.temperature:
            raise conflict("data.weights", self.weights, "data.temperature", "set one of them")
        check_value("data.weights", self.weights, list[float])
        count = len(self.train)
        if len(self.weights) != count or any(not 0 <= one <= 1000 for one in self.weights) or not any(self.weights):
            raise UserError(
                f"data.weights={short_repr(self.weights)} is not allowed; it must be {count} numbers from 0 to 1,000, "
                "one for each corpus of data.train.",
                field="data.weights",
            )

    @property
    def mixture(self) -> Mixture:
        """Weights of the corpora of prepared data."""
        return Mixture(self.weights, self.temperature)

    @property
    def shard_settings(self) -> ShardSettings:
        """Settings of `recnmt prepare`."""
        return ShardSettings(**{entry.name: getattr(self, entry.name) for entry in fields(ShardSettings)})


@documented
@dataclass
class TokenizerSection:
    """Section `tokenizer`. It is trained on the training corpora, unless `source` or `model.init_from` provides one."""

    kind: str = option(
        "bpe", "kind of the source tokenizer; space: split tokenized text at spaces", choices=TOKENIZER_TYPES
    )
    vocab_size: Annotated[int, _SYMBOLS] = option(8000, "number of source symbols, and of target symbols by default")
    target_kind: str | None = option(
        None, "kind of a separate target tokenizer; null: the source's", choices=(None, *TOKENIZER_TYPES)
    )
    target_vocab_size: Annotated[int | None, _SYMBOLS] = option(
        None, "number of symbols of a separate target tokenizer; null: vocab_size"
    )
    joint: bool = option(True, "one vocabulary for both sides")
    min_frequency: Annotated[int, Range(least=1)] = option(1, "minimum frequency of a symbol")
    lowercase: bool = option(False, "lowercase all text")
    byte_fallback: bool | None = option(
        None, "encode unknown characters as bytes (BPE only; takes 256 symbols); null: if vocab_size >= 1000"
    )
    max_sentences: Annotated[int | None, Range(least=1)] = option(
        None, "maximum number of sentence pairs to train the tokenizer on"
    )
    tags: list[str] = field(
        default_factory=list, metadata={"help": "symbols that are never split, such as >>de<< and <bt>"}
    )
    dropout: Annotated[float, Range(least=0, below=1)] = option(
        0.0,
        "BPE dropout: probability of skipping a merge in training; each epoch segments the text differently; 0.1 is "
        "usual, 0 disables it",
    )
    relation_subtypes: bool = option(
        False, "distinguish subtypes of the relations in dependency trees, such as nsubj:pass and nsubj"
    )
    source: str | None = option(None, "folder or model id of an existing source tokenizer")
    target: str | None = option(None, "folder or model id of an existing target tokenizer")

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed or contradicts another."""
        check_fields(self, "tokenizer")
        check_tags(self.tags, "tokenizer.tags", SPECIAL_TOKENS)
        if self.joint and (self.target_kind or self.target_vocab_size or self.target):
            remedy = "set it to false, or remove target* fields"
            raise conflict("tokenizer.joint", True, "a separate target tokenizer", remedy)
        if self.target and not self.source:
            raise requirement("tokenizer.target", self.target, "tokenizer.source", "give both, or neither")


@documented
@dataclass
class AverageSection:
    """Section `average`: the checkpoints whose average is the final model."""

    count: Annotated[int, Range(least=1, most=10000)] = option(5, "number of checkpoints")
    which: str = option("last", "the last checkpoints, or the best by metric_for_best_model", choices=("last", "best"))

    @property
    def keep_option(self) -> str:
        """Name of the training argument that keeps these checkpoints."""
        return "keep_best" if self.which == "best" else "keep_last"


# Arguments of transformers without an effect here; a recipe may only switch them off. Values: what to do instead.
NO_EFFECT = {
    "output_dir": "name the folder with --output",
    "per_device_train_batch_size": "set training.max_tokens: batches are filled by tokens",
    "per_device_eval_batch_size": "set training.max_tokens: batches are filled by tokens",
    "save_total_limit": "set training.keep_last and training.keep_best",
    "load_best_model_at_end": "set average.which: best, and average.count: 1 for the best checkpoint alone",
    "resume_from_checkpoint": "resume with --resume",
    "local_rank": "start several processes with torchrun or accelerate launch, which number them",
    "do_train": "remove it: a run always trains",
    "do_eval": "set training.eval_strategy",
    "do_predict": "name test sets in test",
    "push_to_hub": "publish the finished model with its push_to_hub",
    "predict_with_generate": "set training.bleu_samples to evaluate BLEU by generation",
    "generation_config": "set training.bleu_beams, and decoding for the finished model",
    "generation_max_length": "set decoding.max_length_extra for the finished model",
    "generation_num_beams": "set training.bleu_beams, and decoding.beams for the finished model",
    "use_liger_kernel": "remove it: these models have no Liger kernels",
}


@dataclass
class RunSection:
    """Fields of the section `training` besides those of [`~recnmt_hf.TranslationTrainingArguments`]."""

    early_stopping_patience: Annotated[int | None, Range(least=1)] = option(
        None, "number of evaluations without a better metric_for_best_model after which training ends"
    )
    baseline_steps: Annotated[float | None, Range(above=0, share=True)] = option(
        None,
        "number (or share) of max_steps for a first stage, which trains the plain model from which the variant starts; "
        "its checkpoints are in the subfolder `baseline` of the output",
    )


@dataclass
class TrainingDefaults:
    """Arguments of [`~recnmt_hf.TranslationTrainingArguments`] with another default in recipes."""

    learning_rate: float = 7e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-9
    max_grad_norm: float = 0.0
    lr_scheduler_type: str = "inverse_sqrt"
    warmup_steps: float = 4000
    label_smoothing_factor: float = 0.1
    max_steps: int = 10000
    eval_strategy: str = "steps"
    save_strategy: str = "steps"
    eval_steps: float = 500
    save_steps: float = 500
    logging_steps: float = 50
    metric_for_best_model: str = "bleu"
    report_to: str | list[str] = "none"
    restore_callback_states_from_checkpoint: bool = True
    ddp_find_unused_parameters: bool = False
    seed: int = 1


TRAINING_DEFAULTS = dataclasses.asdict(TrainingDefaults())
STRATEGIES = ("eval_strategy", "save_strategy", "logging_strategy")


@dataclass
class TrainingSection(TrainingDefaults, RunSection):
    """
    Section `training`: fields of [`~recnmt_hf.TranslationTrainingArguments`] and of [`RunSection`].

    `None` selects the default of the Trainer's arguments. `others` holds arguments that are only passed on to them.
    """

    use_cpu: bool | None = None
    ddp_timeout: int = 1800
    ddp_backend: str | None = None
    num_train_epochs: float | None = None
    greater_is_better: bool | None = None
    text_metric: str = "bleu"
    rouge_units: str = "words"
    bleu_samples: int = 500
    bleu_lowercase: bool = False
    bleu_tokenize: str | None = None
    keep_last: int | None = None
    keep_best: int | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, content: Any) -> TrainingSection:
        """Build the section from a mapping, and check it."""
        given = given_fields(content, TRAINING_OPTIONS, "training")
        given |= {name: "no" for name in STRATEGIES if given.get(name) is False}
        if (epochs := given.get("num_train_epochs")) is not None:
            if given.get("max_steps") not in (None, -1):
                other = f"training.max_steps={given['max_steps']}"
                remedy = "set training.max_steps=-1, or remove one of them"
                raise conflict("training.num_train_epochs", epochs, other, remedy)
            given["max_steps"] = -1
        has_metric = given.get("metric_for_best_model") is not None
        if not has_metric:
            given.pop("metric_for_best_model", None)
        typed = {entry.name for entry in fields(cls)} - {"others"}
        others = {name: value for name, value in given.items() if name not in typed}
        section = cls(**{name: value for name, value in given.items() if name in typed}, others=others)
        remember_given(section, given)
        section.check()
        if not has_metric:
            section.metric_for_best_model = section.scorer.names[-1] if section.bleu_samples > 0 else "loss"
        return section

    def __getattr__(self, name: str) -> Any:
        others = self.__dict__.get("others", {})
        if name not in others:
            raise AttributeError(f"The recipe's section training does not set {name}")
        return others[name]

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the run uses the CPU."""
        return not torch.accelerator.is_available() if self.use_cpu is None else self.use_cpu

    @property
    def scorer(self) -> TextScorer:
        """Scorer of generated text."""
        return TextScorer(self.text_metric, self.rouge_units, self.bleu_lowercase, self.bleu_tokenize)

    def to_dict(self) -> dict[str, Any]:
        """Return the defaults of recipes, and the given fields."""
        values = {name: getattr(self, name) for name in TRAINING_DEFAULTS} | stated(self) | self.others
        return {name: value for name, value in values.items() if name != "others"}

    def trainer_settings(self, use_cpu: bool | None) -> dict[str, Any]:
        """Return the arguments of [`~recnmt_hf.TranslationTrainingArguments`]; `use_cpu` replaces the field's value."""
        settings = {"disable_tqdm": not sys.stderr.isatty(), **self.to_dict()}
        if use_cpu is not None:
            settings["use_cpu"] = use_cpu
        excluded = options_of(RunSection).keys() | NO_EFFECT | {"hub_token"}  # checkpoints store the arguments
        return {name: value for name, value in settings.items() if name not in excluded}

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed, or a field that has no effect in recipes."""
        for name, value in self.to_dict().items():
            entry = TRAINING_OPTIONS[name]
            place = f"training.{name}"
            if name in NO_EFFECT and value not in (None, False, entry.default):
                raise UserError(f"{place} has no effect in a recipe: {NO_EFFECT[name]}.", field=place)
            entry = replace(entry, default=TRAINING_DEFAULTS.get(name, entry.default))
            if name == "max_steps" and value == -1:  # epochs decide
                if self.num_train_epochs is None:
                    raise requirement(place, value, "training.num_train_epochs", "set one of them")
                entry = replace(entry, allowed=None)
            value = entry.check(value, place)
            if name == "baseline_steps" and value is not None and value >= 1:
                value = int(value)
            value = value.value if isinstance(value, Enum) else value
            if name in self.others:
                self.others[name] = value
            else:
                setattr(self, name, value)


TRAINING_OPTIONS = {**training_options(), **options_of(RunSection)}

# Translations of a test set are written to model-NAME.LANGUAGE, its scores under its name in results.json.
NAME_OF_A_TEST_SET = re.compile(r"\w[\w.-]{0,99}")
# In the results, the mean over the test sets.
AVERAGE = "average"
RESERVED_NAMES = ("decoding", "averaged", AVERAGE)


@dataclass
class Recipe:
    """
    A training run. Every section may be given as an object or as a mapping, as in YAML.

    Args:
        model ([`ModelSection`]), data ([`DataSection`]), tokenizer ([`TokenizerSection`]): The model and its data.
        training ([`TrainingSection`]): Arguments of training.
        decoding ([`~recnmt_hf.inference.DecodingOptions`]): Decoding options with which the finished model is tested.
        average ([`AverageSection`]): The checkpoints of the final model.
        guided_alignment ([`~recnmt_hf.training.guided_alignment.GuidedAlignment`]): Training on word alignments.
        test (`dict[str, list[Corpus]]`): Test sets by name. A mapping may give a single corpus without a list.

    Raises:
        UserError: A section or field does not exist, or a value is not allowed.
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    average: AverageSection = field(default_factory=AverageSection)
    guided_alignment: GuidedAlignment = field(default_factory=GuidedAlignment)
    test: dict[str, list[Corpus]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {"model": ModelSection, "data": DataSection, "tokenizer": TokenizerSection, "average": AverageSection}
        kinds |= {"guided_alignment": GuidedAlignment, "decoding": DecodingOptions}
        self.data = without_obsolete(self.data)
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                setattr(self, name, parse(kind, getattr(self, name), name))
        for name in ("train", "validation"):
            setattr(self.data, name, parse_corpora(getattr(self.data, name), f"data.{name}"))
        self.data.check()  # before the decoding options are derived from it
        for section, name in ((self.model, "init_from"), (self.tokenizer, "source"), (self.tokenizer, "target")):
            if isinstance(path := getattr(section, name), str):
                setattr(section, name, folder_of_model(path))
        if not isinstance(self.training, TrainingSection):
            self.training = TrainingSection.parse(self.training)
        tokenizer = bleu_tokenizer(self.data.target_lang)
        if (self.training.text_metric, self.training.bleu_tokenize) == ("bleu", None) and tokenizer != "13a":
            self.training.bleu_tokenize = tokenizer  # recorded with the run, whose scores depend on it
        if self.data.on_long == "truncate":
            given = {"on_long": "truncate", "max_source_length": self.data.max_source_length, **stated(self.decoding)}
            self.decoding = parse(DecodingOptions, given, "decoding")
        if isinstance(self.test, list):
            self.test = {name_of_entry(corpus, number): corpus for number, corpus in enumerate(self.test)}
        # `null` drops a test set of an extended recipe.
        tests = {
            name_of_test(name): corpora
            for name, corpora in mapping(self.test, "test").items()
            if corpora not in (None, DEFAULT)
        }
        self._single = {name for name, corpora in tests.items() if isinstance(corpora, (Corpus, Mapping))}
        self.test = {name: parse_corpora(corpora, f"test.{name}") for name, corpora in tests.items()}
        self.check()

    def check(self) -> None:
        """Check everything that needs no file. `UserError` for a value that is not allowed or contradicts another."""
        for section in (self.model, self.data, self.tokenizer, self.training):
            section.check()
        check_fields(self.average, "average")
        check_fields(self.guided_alignment, "guided_alignment")
        check_alignments(self)
        section = self.tokenizer
        origins = {"tokenizer.source": section.source, "model.init_from": self.model.init_from}
        given = next((name for name, value in origins.items() if value is not None), None)
        if section.tags and given is not None:
            raise conflict("tokenizer.tags", section.tags, given, "remove it; a given tokenizer keeps its own tags")
        is_given = given is not None or self.data.prepared is not None
        if section.dropout > 0 and not is_given and {section.kind, section.target_kind or section.kind} != {"bpe"}:
            raise UserError(
                f"tokenizer.dropout={short_repr(section.dropout)} is not supported by this tokenizer. Use one of kind "
                "bpe, or set it to 0.",
                field="tokenizer.dropout",
            )
        if section.dropout > 0 and (self.guides_alignment or any(corpus.has_trees for corpus in self.data.train)):
            other = "alignments" if self.guides_alignment else "dependency trees"
            remedy = "set it to 0: links and trees belong to the tokens of one segmentation"
            raise conflict("tokenizer.dropout", section.dropout, f"{other} in data.train", remedy)
        for name, corpora in self.test.items():
            if len({corpus.target_tag for corpus in corpora}) > 1:
                raise UserError(
                    "the corpora have different target tags. Make a test set for each.", field=f"test.{name}"
                )
        check_plan(self.training, self.average)
        steps = self.training.baseline_steps
        if self.model.init_from is not None and steps is not None:
            other = "model.init_from, which is a trained baseline"
            raise conflict("training.baseline_steps", steps, other, "set one of them to null")
        try:
            replace(self.decoding)
        except UserError as error:
            raise error.inside("decoding") from error
        for name in TEXT_OPTIONS:
            if name in stated(self.decoding):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"decoding.{name} is not supported for test sets. Remove it, and pass {flag} to recnmt translate.",
                    field=f"decoding.{name}",
                )

    @property
    def corpora(self) -> list[tuple[str, Corpus]]:
        """All corpora with their places, e.g. `"data.train[0]"`."""
        sets = {"data.train": self.data.train, "data.validation": self.data.validation}
        sets |= {f"test.{name}": corpora for name, corpora in self.test.items()}
        return [
            (place if place.removeprefix("test.") in self._single else f"{place}[{number}]", corpus)
            for place, corpora in sets.items()
            for number, corpus in enumerate(corpora)
        ]

    @property
    def guides_alignment(self) -> bool:
        """Whether the run trains on word alignments."""
        return self.guided_alignment.weight > 0 and any(corpus.alignments for corpus in self.data.train)

    @property
    def compares_evaluations(self) -> bool:
        """Whether the run compares scores of evaluations at different steps."""
        return self.average.which == "best" or self.training.early_stopping_patience is not None

    def scorer_of(self, corpora: Sequence[Corpus]) -> TextScorer:
        """Return the scorer of a test set, which may be in another language than `data.target_lang`."""
        scorer, (_, language) = self.training.scorer, corpora[0].languages(self.data.source_lang, self.data.target_lang)
        is_default = scorer.tokenize in (None, bleu_tokenizer(self.data.target_lang))
        return replace(scorer, tokenize=bleu_tokenizer(language)) if is_default else scorer

    def with_whole_steps(self, earlier: Any = None) -> Recipe:
        """
        Return the recipe with `training.baseline_steps` as a whole number, if it is a share of all steps. `earlier` is
        the number of a resumed run, which stays, even if the run has more steps now.
        """
        share, max_steps = self.training.baseline_steps, self.training.max_steps
        if share is None or share >= 1:
            return self
        recipe = copy.copy(self)
        recipe.training = copy.copy(self.training)
        is_valid = isinstance(earlier, int) and 0 < earlier < max_steps
        recipe.training.baseline_steps = earlier if is_valid else max(int(share * max_steps), 1)
        return recipe

    def trainer_arguments(self, output_dir: Path, use_cpu: bool | None = None) -> TranslationTrainingArguments:
        """Make the arguments of the Trainer."""
        settings, keep = self.training.trainer_settings(use_cpu), self.average.keep_option
        least = 2 if keep == "keep_last" else 1  # if the newest is damaged, the run resumes from the one before
        return make_arguments({keep: max(least, self.average.count), **settings}, output_dir)

    def stage_arguments(self, output_dir: Path, baseline: Path, use_cpu: bool) -> list[TranslationTrainingArguments]:
        """Make the arguments of the Trainer for each stage of the run; a baseline's stage writes into `baseline`."""
        arguments = self.trainer_arguments(output_dir, use_cpu)
        if self.training.baseline_steps is None:
            return [arguments]
        # No checkpoints of the baseline are averaged.
        return [make_arguments(self.training.trainer_settings(use_cpu), baseline), arguments]

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """
        Read a recipe from a YAML file.

        `extends: other.yaml` (relative to the file) merges the recipe into another one: sections and mappings field by
        field, other values are replaced, and `null` resets a field to its default.

        Args:
            path (`str` or `Path`): The file. Other relative file names in it are relative to the working directory.
            overrides (sequence of `str`): `section.field=value`, applied on top; values are read as YAML.

        Raises:
            FileNotFoundError: The file does not exist.
            UserError: The file is not a YAML mapping, an override has no `=`, or a value is not allowed.
        """
        return cls(**given_fields(content_of(Path(path), overrides), SECTIONS))

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as a mapping with all defaults, as YAML has it."""
        corpora = {name: [stated(corpus) for corpus in getattr(self.data, name)] for name in ("train", "validation")}
        tests = {name: [stated(corpus) for corpus in corpora] for name, corpora in self.test.items()}
        return {
            "model": dataclasses.asdict(self.model),
            "data": {**dataclasses.asdict(self.data), **corpora},
            "tokenizer": dataclasses.asdict(self.tokenizer),
            "training": copy.deepcopy(self.training.to_dict()),
            "decoding": copy.deepcopy(stated(self.decoding)),
            "average": dataclasses.asdict(self.average),
            "guided_alignment": dataclasses.asdict(self.guided_alignment),
            "test": {name: corpora[0] if name in self._single else corpora for name, corpora in tests.items()},
        }

    def to_yaml(self) -> str:
        """Return the recipe with all defaults, as [`from_file`] reads it, with its secrets masked."""
        return dump_yaml(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write the recipe with all defaults."""
        with open_output(path) as file:
            file.write(self.to_yaml())


# Names of the sections.
SECTIONS = tuple(entry.name for entry in fields(Recipe))


def without_obsolete(data: Any) -> Any:
    """Return section `data` without the empty `schedule` that runs of earlier versions wrote; other values as given."""
    if not isinstance(data, Mapping) or data.get("schedule", DEFAULT) != []:
        return data
    return {name: value for name, value in data.items() if name != "schedule"}


def check_alignments(recipe: Recipe) -> None:
    """Check that a recipe with settings of guided alignment has links, and only for training."""
    guided, default = recipe.guided_alignment, GuidedAlignment()
    if guided.weight > 0 and guided != default and not recipe.guides_alignment:
        name = next(
            entry.name for entry in fields(guided) if getattr(guided, entry.name) != getattr(default, entry.name)
        )
        remedy = "name the file of links of a training corpus, or remove the field"
        raise requirement(f"guided_alignment.{name}", getattr(guided, name), "alignments in data.train", remedy)
    for place, corpus in recipe.corpora:
        if corpus.alignments is not None and not place.startswith("data.train"):
            raise UserError("only training reads links.", field=f"{place}.alignments")


def check_plan(training: TrainingSection, average: AverageSection) -> None:
    """Check that the fields of the sections `training` and `average` do not contradict each other."""
    metric, place = training.metric_for_best_model.removeprefix("eval_"), "training.metric_for_best_model"
    check_value(place, metric, Literal[VALIDATION_METRICS])
    if metric not in ("loss", "perplexity"):
        if training.bleu_samples == 0:
            remedy = "set bleu_samples to 100 or more, or the metric to loss"
            raise requirement(place, metric, "training.bleu_samples above 0", remedy)
        if metric not in training.scorer.names:
            remedy = f"use {', '.join(training.scorer.names)}"
            raise conflict(place, metric, f"training.text_metric={training.text_metric}", remedy)
    uses_best = average.which == "best"
    evaluating = {
        "training.early_stopping_patience": training.early_stopping_patience,
        "training.save_strategy": "best" if training.save_strategy == "best" else None,
        "average.which": "best" if uses_best else None,
    }
    for name, value in evaluating.items():
        if value and training.eval_strategy == "no":
            remedy = "set training.eval_strategy to steps, or remove the field"
            raise requirement(name, value, "evaluation during training", remedy)
    if uses_best:
        check_evaluated_checkpoints(training)
        delay = training.others.get("eval_delay") or 0
        length = "max_steps" if training.eval_strategy == "steps" else "num_train_epochs"
        if 0 < (getattr(training, length) or 0) < delay:
            other = f"average.which=best and training.{length}={getattr(training, length)}"
            raise conflict("training.eval_delay", delay, other, "lower it, so that a checkpoint is evaluated")
    baseline_steps, max_steps = training.baseline_steps, training.max_steps
    if baseline_steps is not None and max_steps > 0:
        check_planned_steps(max(baseline_steps, 1), max_steps)
    elif baseline_steps is not None and baseline_steps < 1:
        other, remedy = "training.max_steps, because it is a share", "set max_steps, or a whole number of steps"
        raise requirement("training.baseline_steps", baseline_steps, other, remedy)
    keep = getattr(training, average.keep_option)
    if keep is not None and keep < average.count:
        other = f"average.count={average.count}, which needs as many checkpoints"
        raise conflict(f"training.{average.keep_option}", keep, other, "raise it, or lower the count")
    try:
        higher_is_better(metric, training.greater_is_better)
    except UserError as error:
        raise error.inside("training") from error


def check_planned_steps(baseline_steps: float, steps: int) -> None:
    """Raise `UserError` if the baseline's stage leaves no step for the variant."""
    if baseline_steps >= steps:
        raise UserError(
            f"training.baseline_steps={short_repr(baseline_steps)} must be below {steps}, the number of steps of both "
            "stages together. Raise training.max_steps.",
            field="training.baseline_steps",
        )


def check_evaluated_checkpoints(training: TrainingSection) -> None:
    """Check that checkpoints are evaluated, so that the best can be averaged."""
    evaluates, saves = training.eval_strategy, training.save_strategy
    save_steps, eval_steps = training.save_steps, training.eval_steps or training.logging_steps
    meet = is_multiple(save_steps, eval_steps) or is_multiple(eval_steps, save_steps)
    if saves == "best" or (saves == evaluates and (saves != "steps" or meet)):
        return
    name, value, other = ("strategy", saves, evaluates) if saves != evaluates else ("steps", save_steps, eval_steps)
    other = f"training.eval_{name}={other}"
    raise UserError(
        f"average.which=best needs an evaluation of each checkpoint, but training.save_{name}={short_repr(value)} "
        f"does not match {other}.",
        field=f"training.save_{name}",
    )


def is_multiple(steps: float, of: float) -> bool:
    """Return whether one number of steps is a multiple of another; both may be shares of all steps."""
    return (steps < 1) == (of < 1) and abs(steps / of - round(steps / of)) < 1e-9 and steps >= of


def name_of_entry(corpus: Any, number: int) -> str:
    """Return the name of a test set in a list: that of sacrebleu."""
    name = corpus.get("sacrebleu") if isinstance(corpus, Mapping) else getattr(corpus, "sacrebleu", None)
    if not isinstance(name, str):
        raise UserError(
            f"test[{number}] has no name. Write a mapping, such as test: {{name: {{source: .., target: ..}}}}, or a "
            "list of test sets of sacrebleu.",
            field=f"test[{number}]",
        )
    return name.replace("/", "_")


def name_of_test(name: Any) -> str:
    """Check the name of a test set, which may be a number, and return it as text."""
    text = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
    if not isinstance(text, str) or not NAME_OF_A_TEST_SET.fullmatch(text) or text in RESERVED_NAMES:
        raise UserError(
            f"{short_repr(name)} is not allowed as the name of a test set. Use letters, digits, _, - and ., but not "
            f"{' or '.join(RESERVED_NAMES)}.",
            field="test",
        )
    return text
