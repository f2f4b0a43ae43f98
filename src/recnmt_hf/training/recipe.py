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
    shown,
    stated,
)
from ..data.corpora import ON_LONG, Corpus, parse_corpora
from ..data.files import open_output
from ..data.tokenization import TOKENIZER_TYPES
from ..inference.options import OF_TEXTS, DecodingOptions
from ..models.user_errors import UserError
from .arguments import TranslationTrainingArguments, make_arguments, training_options
from .building import MOST_SYMBOLS, MOST_WIDTH, ModelSection
from .metrics import VALIDATION_METRICS, TextScorer, higher_is_better, without_prefix
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
    on_empty: str = option("error", "what a pair with an empty side is", choices=("error", "skip"))
    max_source_length: Annotated[int, _LENGTH] = option(
        256, "longer training pairs (in tokens) are left out; validation pairs only beyond the model's positions"
    )
    max_target_length: Annotated[int, _LENGTH] = option(256, "likewise, of the target")
    on_long: str = option(
        "skip",
        "truncate: longer sides are cut off in place of that, for summaries; sources of validation and tests too",
        choices=ON_LONG,
    )
    max_length_ratio: Annotated[float | None, Range(least=1)] = option(
        None, "training pairs with lengths further apart are left out"
    )
    cache_dir: str | None = option(None, "where prepared data is kept; null: in the output folder")
    num_proc: Annotated[int | None, Range(least=1, most=1024)] = option(None, "processes that tokenize")

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed."""
        check_fields(self, "data")
        for name in ("source_lang", "target_lang"):
            language = getattr(self, name)
            if not LANGUAGE.fullmatch(language):
                raise UserError(
                    f"data.{name}={shown(language)} is not allowed; it must be a language code of letters, digits, _ "
                    "and -. Remedy: correct it, e.g. en, de or zh-CN."
                )


@documented
@dataclass
class TokenizerSection:
    """Section `tokenizer`. It is trained on the training corpora, unless `source` or `model.init_from` provides one."""

    kind: str = option(
        "bpe",
        "of the source; space: what spaces part, for text that is tokenised already",
        choices=TOKENIZER_TYPES,
    )
    vocab_size: Annotated[int, _SYMBOLS] = option(
        8000, "symbols of the source, and of the target unless target_vocab_size is given"
    )
    target_kind: str | None = option(
        None, "of the target where it differs; not with joint", choices=(None, *TOKENIZER_TYPES)
    )
    target_vocab_size: Annotated[int | None, _SYMBOLS] = option(None, "likewise")
    joint: bool = option(True, "one vocabulary for both sides")
    min_frequency: Annotated[int, Range(least=1)] = option(1, "rarer symbols are left out")
    lowercase: bool = option(False, "drops case")
    byte_fallback: bool | None = option(
        None,
        "whether BPE writes what it does not know in bytes, 256 symbols of the vocabulary; null: from 1000 symbols on",
    )
    max_sentences: Annotated[int | None, Range(least=1)] = option(None, "most sentence pairs to train it on")
    source: str | None = option(None, "folder or model id of an existing tokenizer of the source")
    target: str | None = option(None, "of the target")

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed or contradicts another."""
        check_fields(self, "tokenizer")
        if self.joint and (self.target_kind or self.target_vocab_size or self.target):
            raise UserError(
                "tokenizer.joint=true leaves no place for a target tokenizer of its own. Remedy: set tokenizer.joint: "
                "false, or remove target, target_kind and target_vocab_size."
            )
        if self.target and not self.source:
            raise UserError(
                f"tokenizer.target={shown(self.target)} would be ignored without tokenizer.source. Remedy: name both, "
                "or neither."
            )


@documented
@dataclass
class AverageSection:
    """Section `average`: the checkpoints whose average is the final model."""

    count: Annotated[int, Range(least=1, most=10000)] = option(5, "how many; 1 takes a single one")
    which: str = option("last", "the last ones, or the best by metric_for_best_model", choices=("last", "best"))

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed."""
        check_fields(self, "average")

    @property
    def keep_option(self) -> str:
        """The argument of training that keeps these checkpoints."""
        return "keep_best" if self.which == "best" else "keep_last"


# Arguments of transformers that a recipe sets in another way.
SET_ELSEWHERE = {
    "output_dir": "name the folder with --output",
    "per_device_train_batch_size": "set training.max_tokens: batches are filled by tokens",
    "per_device_eval_batch_size": "set training.max_tokens: batches are filled by tokens",
    "save_total_limit": "set training.keep_last and training.keep_best",
}
# Arguments of transformers without an effect here; a recipe may only switch them off.
WITHOUT_EFFECT = {
    "resume_from_checkpoint": "resume with --resume",
    "local_rank": "start several processes with torchrun or accelerate launch, which number them",
    "do_train": "leave it out: a run trains",
    "do_eval": "set training.eval_strategy",
    "do_predict": "name test sets in test",
    "push_to_hub": "publish the finished model with its push_to_hub",
    "predict_with_generate": "set training.bleu_samples, which makes BLEU by generation",
    "generation_config": "set training.bleu_beams, and decoding for the finished model",
    "generation_max_length": "set decoding.max_length_extra for the finished model",
    "generation_num_beams": "set training.bleu_beams, and decoding.beams for the finished model",
    "use_liger_kernel": "leave it out: these models have no Liger kernels",
}


@dataclass
class RunSection:
    """Fields of the section `training` beside those of [`~recnmt_hf.TranslationTrainingArguments`]."""

    early_stopping_patience: Annotated[int | None, Range(least=1)] = option(
        None, "evaluations without a better metric_for_best_model after which training ends"
    )
    baseline_steps: Annotated[float | None, Range(above=0, share=True)] = option(
        None,
        "the first of max_steps, or their share, which train the plain model that a variant starts from, in the folder "
        "`baseline` of the output",
    )


@dataclass
class TrainingDefaults:
    """Arguments of [`~recnmt_hf.TranslationTrainingArguments`] that have another default in recipes."""

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


@dataclass
class TrainingSection(TrainingDefaults, RunSection):
    """
    Section `training`: fields of [`~recnmt_hf.TranslationTrainingArguments`] and of [`RunSection`].

    `None` leaves a field to the Trainer's arguments. `others` holds the arguments that are only passed on to them.
    """

    use_cpu: bool | None = None
    ddp_timeout: int = 1800
    ddp_backend: str | None = None
    num_train_epochs: float | None = None
    load_best_model_at_end: bool = False
    greater_is_better: bool | None = None
    text_metric: str = "bleu"
    rouge_units: str = "words"
    bleu_samples: int = 500
    bleu_lowercase: bool = False
    keep_last: int | None = None
    keep_best: int | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, content: Any) -> TrainingSection:
        """Build the section from a mapping, and check it."""
        given = given_fields(content, TRAINING_OPTIONS, "training")
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            if given.get(name) is False:
                given[name] = "no"
        if given.get("num_train_epochs") is not None and "max_steps" not in given:
            given["max_steps"] = -1  # epochs decide
        derives_metric = given.get("metric_for_best_model") is None
        if derives_metric:
            given.pop("metric_for_best_model", None)
        typed = {entry.name for entry in fields(cls)} - {"others"}
        section = cls(
            **{name: value for name, value in given.items() if name in typed},
            others={name: value for name, value in given.items() if name not in typed},
        )
        remember_given(section, given)
        section.check()
        if derives_metric:
            section.metric_for_best_model = section.scorer.names[-1] if section.bleu_samples > 0 else "loss"
        return section

    def __getattr__(self, name: str) -> Any:
        others = self.__dict__.get("others", {})
        if name not in others:
            raise AttributeError(f"The recipe's section training does not set {name}")
        return others[name]

    @property
    def scorer(self) -> TextScorer:
        """How generated text is scored."""
        return TextScorer(self.text_metric, self.rouge_units, self.bleu_lowercase)

    def to_dict(self) -> dict[str, Any]:
        """Return the defaults of recipes, and the given fields."""
        values = {name: getattr(self, name) for name in TRAINING_DEFAULTS} | stated(self) | self.others
        values.pop("others", None)
        return values

    def trainer_settings(self, use_cpu: bool | None) -> dict[str, Any]:
        """Return the arguments of [`~recnmt_hf.TranslationTrainingArguments`]; `use_cpu` replaces the field's value."""
        settings = {"disable_tqdm": not sys.stderr.isatty(), **self.to_dict()}
        if use_cpu is not None:
            settings["use_cpu"] = use_cpu
        return {name: value for name, value in settings.items() if name not in options_of(RunSection)}

    def check(self) -> None:
        """Raise `UserError` for a value that is not allowed, or a field that has no effect in recipes."""
        for name, value in self.to_dict().items():
            entry = TRAINING_OPTIONS[name]
            if name in SET_ELSEWHERE:
                raise UserError(f"training.{name} has no effect in a recipe. Remedy: {SET_ELSEWHERE[name]}.")
            if name in WITHOUT_EFFECT and value not in (None, False, entry.default):
                raise UserError(
                    f"training.{name}={shown(value)} has no effect in a recipe. Remedy: {WITHOUT_EFFECT[name]}."
                )
            entry = replace(entry, default=TRAINING_DEFAULTS.get(name, entry.default))
            if name == "max_steps" and value == -1:  # epochs decide
                if self.num_train_epochs is None:
                    raise UserError(
                        "training.max_steps=-1 leaves the length of training to training.num_train_epochs, which is "
                        "missing. Remedy: set one of them."
                    )
                entry = replace(entry, allowed=None)
            value = entry.check(value, f"training.{name}")
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
TAKEN_NAMES = ("decoding", "averaged")


@dataclass
class Recipe:
    """
    A training run. Every section may be given as an object or as a mapping, as in YAML.

    Args:
        model ([`ModelSection`]), data ([`DataSection`]), tokenizer ([`TokenizerSection`]): The model and its data.
        training ([`TrainingSection`]): Arguments of training.
        decoding ([`~recnmt_hf.inference.DecodingOptions`]): Decoding options with which the finished model is tested.
        average ([`AverageSection`]): The checkpoints of the final model.
        test (`dict[str, list[Corpus]]`): Test sets by name. A mapping may give a single corpus without a list.

    Raises:
        ValueError: A section or field does not exist, or a value is not allowed; the message names it, and the nearest
            existing name.
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    average: AverageSection = field(default_factory=AverageSection)
    test: dict[str, list[Corpus]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {"model": ModelSection, "data": DataSection, "tokenizer": TokenizerSection, "average": AverageSection}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                setattr(self, name, parse(kind, getattr(self, name), name))
        for name in ("train", "validation"):
            corpora: Any = getattr(self.data, name)
            corpora = [corpora] if isinstance(corpora, (Corpus, Mapping)) else corpora
            setattr(self.data, name, parse_corpora(corpora, f"data.{name}"))
        self.data.check()  # before the decoding options are derived from it
        if not isinstance(self.training, TrainingSection):
            self.training = TrainingSection.parse(self.training)
        if not isinstance(self.decoding, DecodingOptions):
            self.decoding = parse(DecodingOptions, self.decoding, "decoding")
        if self.data.on_long == "truncate":
            given = {"on_long": "truncate", "max_source_length": self.data.max_source_length, **stated(self.decoding)}
            self.decoding = parse(DecodingOptions, given, "decoding")
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
        """
        Check everything that needs no file.

        Raises:
            UserError: A value has the wrong type or range, or contradicts another.
        """
        for section in (self.model, self.data, self.tokenizer, self.training, self.average):
            section.check()
        check_plan(self.training, self.average)
        if self.model.init_from is not None and self.training.baseline_steps is not None:
            raise UserError(
                f"training.baseline_steps={self.training.baseline_steps} trains the baseline that "
                f"model.init_from={shown(self.model.init_from)} names already. Remedy: leave out one of them (in a "
                "recipe that extends another: null)."
            )
        try:
            replace(self.decoding)
        except UserError as error:
            raise UserError(f"decoding.{error}") from error
        for name in OF_TEXTS:
            if name in stated(self.decoding):
                raise UserError(
                    f"decoding.{name} is not allowed: each line of a test set is translated as it is, so that scores "
                    f"can be compared. Remedy: remove it, and pass it to recnmt translate (--{name.replace('_', '-')})."
                )
        check_value("test", self.test, dict[str, list[Corpus]])

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
    def compares_evaluations(self) -> bool:
        """Whether the run compares scores of evaluations at different steps."""
        return self.average.which == "best" or self.training.early_stopping_patience is not None

    @property
    def validation_decoding(self) -> dict[str, Any]:
        """The given decoding options of lengths, which also hold for text generated during training."""
        names = ("max_length_factor", "max_length_extra", "max_source_length", "on_long")
        options = {name: value for name, value in stated(self.decoding).items() if name in names}
        # A validation sentence that is too long must not end the training.
        return {**options, "on_long": "split"} if options.get("on_long") == "error" else options

    def with_whole_steps(self, earlier: Any = None) -> Recipe:
        """
        Return the recipe with `training.baseline_steps` as a whole number, if it is a share of all steps.

        Args:
            earlier (*optional*): The number that a resumed run was started with. It is kept, even if the run has more
                steps now.
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
        return make_arguments({**settings, keep: max(settings.get(keep, 1), self.average.count)}, output_dir)

    def stage_arguments(self, output_dir: Path, baseline: Path, use_cpu: bool) -> list[TranslationTrainingArguments]:
        """Make the arguments of the Trainer for each stage of the run; a baseline's stage writes into `baseline`."""
        arguments = self.trainer_arguments(output_dir, use_cpu)
        if self.training.baseline_steps is None:
            return [arguments]
        # No checkpoints of the baseline are averaged.
        settings = {**self.training.trainer_settings(use_cpu), "load_best_model_at_end": False}
        return [make_arguments(settings, baseline), arguments]

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """
        Read a recipe from a YAML file.

        With `extends: other.yaml` (relative to the file) a recipe changes another one: sections and mappings are merged
        field by field, other values are replaced, and `null` resets a field to its default.

        Args:
            path (`str` or `Path`): The file. Other relative file names in it are relative to the working directory.
            overrides (sequence of `str`): `section.field=value`, applied on top; values are read as YAML, and `null`
                resets a field to its default.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The file is not a YAML mapping, an override has no `=`, or a value is not allowed.
        """
        sections = set(SECTIONS)
        return cls(**given_fields(content_of(Path(path), overrides, sections), sections, "the recipe"))

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
            "test": {name: corpora[0] if name in self._single else corpora for name, corpora in tests.items()},
        }

    def to_yaml(self) -> str:
        """Return the recipe with all defaults, as [`from_file`] reads it."""
        return dump_yaml(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write the recipe with all defaults."""
        with open_output(path) as file:
            file.write(self.to_yaml())


# Names of the sections.
SECTIONS = tuple(entry.name for entry in fields(Recipe))


def check_plan(training: TrainingSection, average: AverageSection) -> None:
    """Check that the fields of the sections `training` and `average` do not contradict each other."""
    metric = without_prefix(training.metric_for_best_model)
    check_value("training.metric_for_best_model", metric, Literal[VALIDATION_METRICS])
    evaluates, saves = training.eval_strategy, training.save_strategy
    generated = metric not in ("loss", "perplexity")
    if generated and training.bleu_samples == 0:
        raise UserError(
            f"training.metric_for_best_model={metric} needs translations, but training.bleu_samples=0 switches them "
            "off. Remedy: set bleu_samples to 100 or more, or metric_for_best_model to loss."
        )
    if generated and metric not in training.scorer.names:
        raise UserError(
            f"training.metric_for_best_model={metric} is not measured: training.text_metric is "
            f"{training.text_metric}. Remedy: set one of {', '.join(training.scorer.names)}, or the other text_metric."
        )
    needing = {
        "training.early_stopping_patience": training.early_stopping_patience,
        "training.load_best_model_at_end": training.load_best_model_at_end,
        "training.save_strategy=best": saves == "best",
        "average.which=best": average.which == "best",
    }
    for name, is_set in needing.items():
        if is_set and evaluates == "no":
            raise UserError(
                f"{name} needs evaluation during training, but training.eval_strategy is no. Remedy: set it to steps, "
                "or leave the other out."
            )
    if average.which == "best" or training.load_best_model_at_end:
        check_evaluated_checkpoints(training, average)
    baseline_steps, max_steps = training.baseline_steps, training.max_steps
    if baseline_steps is not None and baseline_steps < 1 and max_steps < 0:
        raise UserError(
            f"training.baseline_steps={baseline_steps} is a share of training.max_steps, which is not given. Remedy: "
            "write a whole number of steps, or training.max_steps in place of training.num_train_epochs."
        )
    if baseline_steps is not None and 0 < max_steps <= max(baseline_steps, 1):
        raise UserError(
            f"training.baseline_steps={baseline_steps} leaves no step for the variant: both stages together have "
            f"training.max_steps={max_steps}. Remedy: lower the one, or raise the other."
        )
    name = average.keep_option
    keep = getattr(training, name)
    if keep is not None and keep < average.count:
        raise UserError(
            f"average.count={average.count} needs as many checkpoints, but training.{name}={keep} keeps fewer. "
            f"Remedy: raise {name}, or lower average.count."
        )
    higher_is_better(metric, training.greater_is_better, "training.")


def check_evaluated_checkpoints(training: TrainingSection, average: AverageSection) -> None:
    """Check that checkpoints are evaluated, so that the best can be chosen."""
    evaluates, saves = training.eval_strategy, training.save_strategy
    place = "average.which=best" if average.which == "best" else "training.load_best_model_at_end"
    if saves == "best":
        return
    if saves != evaluates:
        raise UserError(
            f"{place} needs checkpoints that are evaluated, but training.eval_strategy is {evaluates} and "
            f"training.save_strategy {saves}. Remedy: set both alike."
        )
    save_steps, eval_steps = training.save_steps, training.eval_steps or training.logging_steps
    meet = is_multiple(save_steps, eval_steps) or (average.which == "best" and is_multiple(eval_steps, save_steps))
    if saves == "steps" and not meet:
        raise UserError(
            f"{place} needs checkpoints that are evaluated, but training.save_steps={save_steps} is no multiple of "
            f"training.eval_steps={eval_steps}. Remedy: set both alike."
        )


def is_multiple(steps: float, of: float) -> bool:
    """Return whether one number of steps is a multiple of another; both may be shares of all steps."""
    return (steps < 1) == (of < 1) and abs(steps / of - round(steps / of)) < 1e-9 and steps >= of


def name_of_test(name: Any) -> str:
    """Return the name of a test set as text; it may be a number, such as 2014."""
    text = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
    if not isinstance(text, str) or not NAME_OF_A_TEST_SET.fullmatch(text) or text in TAKEN_NAMES:
        raise UserError(
            f"test: {shown(name)} is no name for a test set; it must be a file's name of letters, digits, _, - and . "
            f"(but not {' or '.join(TAKEN_NAMES)}). Remedy: choose another, e.g. newstest2014."
        )
    return text
