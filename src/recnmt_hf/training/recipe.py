"""Recipes: one YAML file says everything about a training run."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from .._values import LANGUAGE, Range, check_value, documented, is_plain, option, options_of, shown
from ..data.corpora import ON_LONG, Corpus
from ..data.files import open_output
from ..data.tokenization import TOKENIZER_TYPES
from ..families import MODEL_TYPES
from ..inference.options import OF_TEXTS, DecodingOptions
from ..models.user_errors import UserError
from .metrics import TEXT_METRICS, VALIDATION_METRICS, higher_is_better, without_prefix
from .model_types import EXAMPLE, check_model_type
from .recipe_yaml import dump_yaml, load_yaml, read_text
from .trainer import TranslationTrainingArguments, training_options


GENERATED = {"train": [{"generated": "train"}], "validation": [{"generated": "validation"}]}


# Sizes beyond these are slips of the keyboard, found before memory is asked for.
MOST_LAYERS, MOST_WIDTH, MOST_SYMBOLS = 1000, 2**20, 10**7
_LENGTH = Range(least=2, most=MOST_WIDTH)  # a word and the end token
_SYMBOLS = Range(least=5, most=MOST_SYMBOLS)  # one beside the special tokens


@documented
@dataclass
class ModelSection:
    """Which model."""

    type: str = option(
        "nmt_transformer",
        f"its `model_type`: {', '.join(MODEL_TYPES)}, or another that is registered with `AutoConfig`; or the path of "
        f"a class to import: `{EXAMPLE}`",
    )
    preset: str = option("small", "its size")
    fields: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "configuration fields in place of the preset's"}
    )
    init_from: str | None = option(None, "a trained baseline to start from (`init_from_baseline`), with its tokenizers")


@documented
@dataclass
class DataSection:
    """Which sentence pairs; see [`~recnmt_hf.data.Corpus`] for what an entry of `train` and `validation` may say."""

    source_lang: str = option("en", "language code of the source")
    target_lang: str = option("de", "language code of the target")
    train: list[dict[str, Any]] = field(
        default_factory=lambda: list(GENERATED["train"]),
        metadata={"help": "corpora to train on; the generated one by default"},
    )
    validation: list[dict[str, Any]] = field(
        default_factory=lambda: list(GENERATED["validation"]),
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


@documented
@dataclass
class TokenizerSection:
    """Which tokenizer, trained on the training corpora unless `source` or `model.init_from` brings one."""

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


@documented
@dataclass
class AverageSection:
    """Which checkpoints make the final model."""

    count: Annotated[int, Range(least=1, most=10000)] = option(5, "how many; 1 takes a single one")
    which: str = option("last", "the last ones, or the best by metric_for_best_model", choices=("last", "best"))


@documented
@dataclass
class RunSection:
    """What the section `training` says beside the fields of [`TranslationTrainingArguments`]."""

    early_stopping_patience: Annotated[int | None, Range(least=1)] = option(
        None, "evaluations without a better metric_for_best_model after which training ends"
    )
    baseline_steps: Annotated[float | None, Range(above=0, share=True)] = option(
        None,
        "the first of max_steps, or their share, which train the plain model that a variant starts from, in the folder "
        "`baseline` of the output",
    )


# Where a recipe says nothing; field names are those of TranslationTrainingArguments.
TRAINING_DEFAULTS: dict[str, Any] = {
    "learning_rate": 7e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-9,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "inverse_sqrt",
    "warmup_steps": 4000,
    "label_smoothing_factor": 0.1,
    "max_steps": 10000,
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 500,
    "save_steps": 500,
    "logging_steps": 50,
    "metric_for_best_model": "bleu",
    "report_to": "none",
    "restore_callback_states_from_checkpoint": True,
    "ddp_find_unused_parameters": False,
    "seed": 1,
}
# What transformers' arguments have and a recipe says otherwise.
SAID_ELSEWHERE = {
    "output_dir": "name the folder with --output",
    "per_device_train_batch_size": "set training.max_tokens: batches are filled by tokens",
    "per_device_eval_batch_size": "set training.max_tokens: batches are filled by tokens",
    "save_total_limit": "set training.keep_last and training.keep_best",
}
# What they have and a run of ours does not do; a recipe may say that it is off.
NOT_DONE = {
    "resume_from_checkpoint": "go on with --resume",
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

# A test set's translations stand in model-NAME.LANGUAGE, its scores under its name in results.json.
NAME_OF_A_TEST_SET = re.compile(r"\w[\w.-]{0,99}")
TAKEN_NAMES = ("decoding", "averaged")
# Names of a recipe's fields: section.field.
FIELD_DEPTH = 2
# Value of a field that a recipe sets back by null.
DEFAULT = object()


@dataclass
class Recipe:
    """
    A training run.

    Args:
        model, data, tokenizer, average: The sections above, as objects or mappings.
        training (`dict`): Fields of [`TranslationTrainingArguments`], and of [`RunSection`] beside them.
        decoding (`dict`): Fields of [`~recnmt_hf.inference.DecodingOptions`]: how the finished model is tested.
        test (`dict`): Names of test sets and their corpora.

    Raises:
        ValueError: A section or field does not exist, or a value is not allowed; the message names it, and the nearest
            existing name.
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    training: dict[str, Any] = field(default_factory=dict)
    decoding: dict[str, Any] = field(default_factory=dict)
    average: AverageSection = field(default_factory=AverageSection)
    test: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                setattr(self, name, section(kind, value, name))
        for name in ("train", "validation"):
            if isinstance(corpus := getattr(self.data, name), Mapping):
                setattr(self.data, name, [corpus])
        known = {f.name for f in fields(TranslationTrainingArguments) if f.init} | set(options_of(RunSection))
        given = given_fields(self.training, known, "training")
        self.training = {**TRAINING_DEFAULTS, **given}
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            if self.training.get(name) is False:
                self.training[name] = "no"
        self.training = check_training(self.training)
        if self.training.get("num_train_epochs") is not None and "max_steps" not in given:
            self.training["max_steps"] = -1  # epochs decide
        if given.get("metric_for_best_model") is None:
            best = TEXT_METRICS[self.training.get("text_metric", "bleu")][-1]
            self.training["metric_for_best_model"] = best if self.training.get("bleu_samples", 1) > 0 else "loss"
        self.decoding = given_fields(self.decoding, {f.name for f in fields(DecodingOptions)}, "decoding")
        if self.data.on_long == "truncate":
            self.decoding = {
                "on_long": "truncate",
                "max_source_length": self.data.max_source_length,
                **self.decoding,
            }
        for name in OF_TEXTS:
            if name in self.decoding:
                raise UserError(
                    f"decoding.{name} is not allowed: each line of a test set is translated as it is, so that scores "
                    f"can be compared. Remedy: remove it, and pass it to recnmt translate (--{name.replace('_', '-')})."
                )
        # A recipe that extends another drops a test set of that one by null.
        tests = mapping(self.test, "test")
        self.test = {name_of_test(name): corpora for name, corpora in tests.items() if corpora not in (None, DEFAULT)}
        self.check()

    def check(self) -> None:
        """
        Checks everything that needs no file.

        Raises:
            UserError: A value has the wrong type or range, or contradicts another.
        """
        check_model_type(self.model.type)
        for name in SECTIONS:
            check_section(getattr(self, name), name)
        check_strings(self.model.fields, "model.fields")
        for name, limit in sizes(self.model.fields):
            check_value(name, limit[0], int, Range(most=limit[1]))
        for name in ("source_lang", "target_lang"):
            language = getattr(self.data, name)
            if not LANGUAGE.fullmatch(language):
                raise UserError(
                    f"data.{name}={shown(language)} is not allowed; it must be a language code of letters, digits, _ "
                    "and -. Remedy: correct it, e.g. en, de or zh-CN."
                )
        separate = self.tokenizer.target_kind or self.tokenizer.target_vocab_size or self.tokenizer.target
        if self.tokenizer.joint and separate:
            raise UserError(
                "tokenizer.joint=true leaves no place for a target tokenizer of its own. Remedy: set tokenizer.joint: "
                "false, or remove target, target_kind and target_vocab_size."
            )
        if self.tokenizer.target and not self.tokenizer.source:
            raise UserError(
                f"tokenizer.target={shown(self.tokenizer.target)} would be ignored without tokenizer.source. Remedy: "
                "name both, or neither."
            )
        self.training = check_training(self.training)
        check_plan(self.training, self.average)
        if self.model.init_from is not None and self.training.get("baseline_steps") is not None:
            raise UserError(
                f"training.baseline_steps={self.training['baseline_steps']} trains the baseline that "
                f"model.init_from={shown(self.model.init_from)} names already. Remedy: leave out one of them (in a "
                "recipe that extends another: null)."
            )
        try:
            DecodingOptions(**self.decoding)
        except UserError as error:
            raise UserError(f"decoding.{error}") from error
        for name, corpora in self.corpora():
            for place, corpus in each_corpus(name, corpora):
                check_corpus(place, corpus)

    def corpora(self) -> list[tuple[str, Any]]:
        """Places and values of everything that names corpora."""
        tests = [(f"test.{name}", corpora) for name, corpora in self.test.items()]
        return [("data.train", self.data.train), ("data.validation", self.data.validation), *tests]

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """
        Reads a YAML file, with changes on top.

        A file may say `extends: other.yaml` (relative to itself) and then just what differs: sections and mappings are
        merged field by field, everything else is replaced, and `null` sets a field back to its default.

        Args:
            path (`str` or `Path`): The file. Other relative file names in it are relative to the working directory.
            overrides (sequence of `str`): `section.field=value`; values are read as YAML, and `null` sets a field back
                to its default.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no YAML mapping, or an override has no `=`.
        """
        known = {f.name for f in fields(cls)}
        return cls(**given_fields(content_of(Path(path), overrides, known), known, "the recipe"))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """The recipe with all defaults filled in, as [`from_file`] reads it."""
        return dump_yaml(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Writes the recipe with all defaults filled in."""
        with open_output(path) as file:
            file.write(self.to_yaml())


SECTIONS = {"model": ModelSection, "data": DataSection, "tokenizer": TokenizerSection, "average": AverageSection}


def content_of(path: Path, overrides: Sequence[str], known: set[str]) -> dict[str, Any]:
    """
    The content of a recipe's file, with overrides on top; see [`Recipe.from_file`].

    Args:
        known (set of `str`): The sections that a recipe of this kind has.
    """
    content = read_recipe(path, known)
    set_by: list[list[str]] = []
    for override in overrides:
        name, equals, value = override.partition("=")
        parts = name.split(".")
        if not equals or not all(parts) or name != name.strip():
            raise UserError(f"{shown(override)} is no override. Remedy: write section.field=value.")
        if not value.strip():
            raise UserError(
                f"{name}= has no value. Remedy: write {name}=null for its default, {name}='\"\"' for no text."
            )
        for earlier in set_by:
            if parts == earlier[: len(parts)]:
                raise UserError(f"{name} replaces {'.'.join(earlier)} given before it. Remedy: give one of them.")
        set_by.append(parts)
        place = content
        for depth, parent in enumerate(parts[:-1], start=1):
            if place.get(parent) in (None, DEFAULT):
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                scalar = ".".join(parts[:depth])
                raise UserError(
                    f"{name} cannot be set: {scalar} is {kind_of(place)}, not a mapping. Remedy: give {scalar} as "
                    "a whole."
                )
        place[parts[-1]] = load_yaml(value, f"the value of {name}")
        if place[parts[-1]] is None and len(parts) <= FIELD_DEPTH:
            place[parts[-1]] = DEFAULT
    return content


def read_recipe(path: Path, known: set[str], extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The content of a recipe's file, on top of the one it extends."""
    text = read_text(path)
    if path.resolve() in extended_by:
        raise UserError(f"{path} extends itself. Remedy: correct its line `extends`.")
    if len(extended_by) >= 32:
        raise UserError(f"{path} is the last of more than 32 recipes that extend each other. Remedy: join some.")
    content = load_yaml(text, str(path))
    if content is not None and not isinstance(content, dict):
        raise UserError(
            f"{path} is no recipe: it must be a mapping of sections, not {kind_of(content)}. Remedy: correct the path, "
            "or write sections such as training: {max_steps: 1000}."
        )
    content = content or {}
    extended = content.pop("extends", None)
    if extended_by and any(name not in known for name in content):  # its words stay where they are
        raise UserError(
            f"{path} is no recipe: it has other sections than {', '.join(sorted(known))}. Remedy: correct the line "
            f"`extends` of {extended_by[-1]}, or this file."
        )
    if extended is None:
        return content
    if not isinstance(extended, str) or not extended:
        raise UserError(
            f"{path}: extends must be the name of one file, not {kind_of(extended)}. Remedy: write extends: base.yaml."
        )
    return merged(read_recipe(path.parent / extended, known, (*extended_by, path.resolve())), content)


def merged(below: Mapping[str, Any], above: Mapping[str, Any], depth: int = FIELD_DEPTH) -> dict[str, Any]:
    """
    `above` on top of `below`: mappings are merged, other values replaced. Down to `depth`, `None` becomes `DEFAULT`;
    deeper, as in `model.fields`, it is a value.
    """
    result = dict(below)
    for name, value in above.items():
        if isinstance(value, Mapping):
            inner = result.get(name)
            result[name] = merged(inner if isinstance(inner, Mapping) else {}, value, max(depth - 1, 0))
        else:
            result[name] = DEFAULT if value is None and depth else value
    return result


def kind_of(value: Any) -> str:
    """A value's kind, for messages that must not show it."""
    kinds = {str: "text", bool: "true or false", list: "a list", dict: "a mapping", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def mapping(value: Any, name: str) -> dict[str, Any]:
    """A section's content; one without any is empty."""
    if value is not None and not isinstance(value, Mapping):
        raise UserError(
            f"{name} must be a mapping of names to values, not {kind_of(value)}. Remedy: write {name}: {{name: value}}."
        )
    return dict(value or {})


def given_fields(value: Any, known: set[str], name: str) -> dict[str, Any]:
    """A section's content, all of whose names are known, without the fields that null sets back."""
    value = mapping(value, name)
    check_names(value, known, name)
    return {field_name: one for field_name, one in value.items() if one is not DEFAULT}


def section(kind: type, value: Any, name: str) -> Any:
    return kind(**given_fields(value, {f.name for f in fields(kind)}, name))


def check_names(value: Mapping[str, Any], known: set[str], place: str) -> None:
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(sorted(known)[:12])} ..."
            raise UserError(f"{place} has no field {shown(name)}; {hint} Remedy: correct it.")


def check_section(value: Any, place: str) -> None:
    """Types, ranges and choices of a section's fields."""
    kind: type = type(value)
    for field_name, each in options_of(kind).items():
        name = f"{place}.{field_name}"
        found = getattr(value, field_name)
        found = each.check(found, name)
        if found == "":
            raise UserError(f"{name} is empty. Remedy: leave it out, or write what it shall be.")
        setattr(value, field_name, found)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        words = ["null" if choice is None else choice for choice in choices]
        near = difflib.get_close_matches(str(value), [choice for choice in choices if choice], n=1)
        hint = f"write {near[0]}" if near else "choose one of them"
        raise UserError(f"{name}={shown(value)} is not allowed; it must be one of {', '.join(words)}. Remedy: {hint}.")


def check_strings(value: Any, place: str) -> None:
    """Texts and numbers within free values are such as can be written down."""
    if isinstance(value, str) and not is_plain(value):
        raise UserError(f"{place}={shown(value)} is not allowed; it must be text. Remedy: correct it.")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        check_value(place, value, float)
    for key, one in value.items() if isinstance(value, Mapping) else ():
        check_strings(one, f"{place}.{key}")
    for number, one in enumerate(value) if isinstance(value, list) else ():
        check_strings(one, f"{place}[{number}]")


def sizes(fields_of_model: Mapping[str, Any]) -> list[tuple[str, tuple[int, int]]]:
    """The whole numbers among a model's fields, and the most that each may be."""
    found = []
    for name, value in fields_of_model.items():
        most = MOST_LAYERS if name.endswith("_layers") else MOST_SYMBOLS if "vocab" in name else MOST_WIDTH
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, int) and not isinstance(one, bool):
                place = f"model.fields.{name}" + (f"[{number}]" if isinstance(value, list) else "")
                found.append((place, (one, most)))
    return found


def check_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """Types and ranges of the training section's fields."""
    known = {**training_options(), **options_of(RunSection)}
    checked = {}
    for name, value in training.items():
        if name in SAID_ELSEWHERE:
            raise UserError(f"training.{name} has no effect in a recipe. Remedy: {SAID_ELSEWHERE[name]}.")
        if name in NOT_DONE and value not in (None, False, known[name].default):
            raise UserError(f"training.{name}={shown(value)} has no effect in a recipe. Remedy: {NOT_DONE[name]}.")
        each = replace(known[name], default=TRAINING_DEFAULTS.get(name, known[name].default))
        if name == "max_steps" and value == -1 and training.get("num_train_epochs") is None:
            raise UserError(
                "training.max_steps=-1 leaves the length of training to training.num_train_epochs, which is missing. "
                "Remedy: set one of them."
            )
        if name == "max_steps" and value == -1:
            each = replace(each, allowed=None)  # epochs decide
        value = each.check(value, f"training.{name}")
        checked[name] = value.value if isinstance(value, Enum) else value
    if checked.get("baseline_steps", 0) is not None and checked.get("baseline_steps", 0) >= 1:
        checked["baseline_steps"] = int(checked["baseline_steps"])
    return checked


def check_plan(training: Mapping[str, Any], average: AverageSection) -> None:
    """What the training section says at several places goes together."""
    metric = without_prefix(training["metric_for_best_model"])
    check_choice("training.metric_for_best_model", metric, VALIDATION_METRICS)
    higher_is_better(metric, training.get("greater_is_better"), "training.")
    evaluates, saves = str(training["eval_strategy"]), str(training["save_strategy"])
    generated = metric not in ("loss", "perplexity")
    if generated and training.get("bleu_samples", 1) == 0:
        raise UserError(
            f"training.metric_for_best_model={metric} needs translations, but training.bleu_samples=0 switches them "
            "off. Remedy: set bleu_samples to 100 or more, or metric_for_best_model to loss."
        )
    text_metric = training.get("text_metric", "bleu")
    if generated and metric not in TEXT_METRICS[text_metric]:
        raise UserError(
            f"training.metric_for_best_model={metric} is not measured: training.text_metric is {text_metric}. Remedy: "
            f"set one of {', '.join(TEXT_METRICS[text_metric])}, or the other text_metric."
        )
    needing = {
        "training.early_stopping_patience": training.get("early_stopping_patience"),
        "training.load_best_model_at_end": training.get("load_best_model_at_end"),
        "training.save_strategy=best": saves == "best",
        "average.which=best": average.which == "best",
    }
    for name, is_set in needing.items():
        if is_set and evaluates == "no":
            raise UserError(
                f"{name} needs evaluation during training, but training.eval_strategy is no. Remedy: set it to steps, "
                "or leave the other out."
            )
    if average.which == "best" or training.get("load_best_model_at_end"):
        check_evaluated_checkpoints(training, evaluates, saves, average)
    baseline_steps = training.get("baseline_steps")
    if baseline_steps is not None and baseline_steps < 1 and training["max_steps"] < 0:
        raise UserError(
            f"training.baseline_steps={baseline_steps} is a share of training.max_steps, which is not given. Remedy: "
            "write a whole number of steps, or training.max_steps in place of training.num_train_epochs."
        )
    if baseline_steps is not None and 0 < training["max_steps"] <= max(baseline_steps, 1):
        raise UserError(
            f"training.baseline_steps={baseline_steps} leaves no step for the variant: both stages together have "
            f"training.max_steps={training['max_steps']}. Remedy: lower the one, or raise the other."
        )
    stated = "keep_best" if average.which == "best" else "keep_last"
    if stated in training and training[stated] < average.count:
        raise UserError(
            f"average.count={average.count} needs as many checkpoints, but training.{stated}={training[stated]} keeps "
            f"fewer. Remedy: raise {stated}, or lower average.count."
        )


def check_evaluated_checkpoints(
    training: Mapping[str, Any], evaluates: str, saves: str, average: AverageSection
) -> None:
    """Checkpoints can be ranked only where an evaluation and a save meet."""
    place = "average.which=best" if average.which == "best" else "training.load_best_model_at_end"
    if saves == "best":
        return
    if saves != evaluates:
        raise UserError(
            f"{place} needs checkpoints that are evaluated, but training.eval_strategy is {evaluates} and "
            f"training.save_strategy {saves}. Remedy: set both alike."
        )
    every, each = training["save_steps"], training.get("eval_steps") or training["logging_steps"]
    alike = is_multiple(every, each) or (place == "average.which=best" and is_multiple(each, every))
    if saves == "steps" and not alike:
        raise UserError(
            f"{place} needs checkpoints that are evaluated, but training.save_steps={every} is no multiple of "
            f"training.eval_steps={each}. Remedy: set both alike."
        )


def is_multiple(steps: float, of: float) -> bool:
    """Whether one number of steps is a multiple of another; both may be shares of all steps."""
    return (steps < 1) == (of < 1) and abs(steps / of - round(steps / of)) < 1e-9 and steps >= of


def name_of_test(name: Any) -> str:
    """A test set's name; 2014 is one too."""
    text = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
    if not isinstance(text, str) or not NAME_OF_A_TEST_SET.fullmatch(text) or text in TAKEN_NAMES:
        raise UserError(
            f"test: {shown(name)} is no name for a test set; it must be a file's name of letters, digits, _, - and . "
            f"(but not {' or '.join(TAKEN_NAMES)}). Remedy: choose another, e.g. newstest2014."
        )
    return text


def each_corpus(name: str, corpora: Any) -> list[tuple[str, Any]]:
    """Place and value of each corpus; a single one may stand without a list."""
    if isinstance(corpora, (Corpus, Mapping)):
        return [(name, corpora)]
    if not isinstance(corpora, (list, tuple)) or not corpora:
        raise UserError(
            f"{name} must be a list of corpora, not {kind_of(corpora) if corpora != [] else 'an empty list'}. Remedy: "
            "write e.g. [{source: a.en, target: a.de}] or [{generated: train}]."
        )
    return [(f"{name}[{number}]", corpus) for number, corpus in enumerate(corpora)]


def check_corpus(place: str, corpus: Any) -> Corpus:
    """
    The corpus that a recipe names.

    Raises:
        UserError: It has an unknown field, a value of the wrong type, or not exactly one kind of source.
    """
    if isinstance(corpus, Corpus):
        return corpus
    corpus = mapping(corpus, place)
    check_names(corpus, {f.name for f in fields(Corpus)}, place)
    for one in fields(Corpus):
        if one.name in corpus:
            name = f"{place}.{one.name}"
            corpus[one.name] = options_of(Corpus)[one.name].check(corpus[one.name], name)
            if corpus[one.name] == "":
                raise UserError(f"{name} is empty. Remedy: leave it out, or write what it shall be.")
    try:
        return Corpus(**corpus)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
