"""Recipes: a YAML file describes a training run, and is parsed and checked once into typed sections."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..data.corpora import Corpus, parse_corpora
from ..data.files import open_output
from ..errors import UserError, short_repr
from ..inference.options import TEXT_OPTIONS, DecodingOptions
from ..metrics.bleu import bleu_tokenizer
from ..options import DEFAULT, check_value, given_fields, mapping, parse, stated
from .building import ModelSection
from .guided_alignment import GuidedAlignment
from .metrics import VALIDATION_METRICS, higher_is_better
from .recipe_yaml import content_of, dump_yaml
from .sections import (
    NO_EFFECT,
    TRAINING_DEFAULTS,
    TRAINING_OPTIONS,
    AverageSection,
    DataSection,
    RunSection,
    TokenizerSection,
    TrainingSection,
)


__all__ = ["NO_EFFECT", "TRAINING_DEFAULTS", "TRAINING_OPTIONS", "ModelSection", "Recipe", "RunSection"]

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
        if isinstance(self.data, Mapping) and self.data.get("schedule", DEFAULT) == []:  # of earlier versions
            given = {name: value for name, value in self.data.items() if name != "schedule"}
            self.data = parse(DataSection, given, "data")
        kinds = {"model": ModelSection, "data": DataSection, "tokenizer": TokenizerSection, "average": AverageSection}
        kinds |= {"guided_alignment": GuidedAlignment, "decoding": DecodingOptions}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                setattr(self, name, parse(kind, getattr(self, name), name))
        if not isinstance(self.training, TrainingSection):
            self.training = TrainingSection.parse(self.training)
        tokenizer = bleu_tokenizer(self.data.target_lang)
        if (self.training.text_metric, self.training.bleu_tokenize) == ("bleu", None) and tokenizer != "13a":
            self.training.bleu_tokenize = tokenizer  # recorded with the run, whose scores depend on it
        for name in TEXT_OPTIONS:
            if name in stated(self.decoding):
                raise UserError(
                    f"decoding.{name} is not supported for test sets. Remove it, and pass "
                    f"--{name.replace('_', '-')} to recnmt translate.",
                    field=f"decoding.{name}",
                )
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
        check_sections(self)

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


def check_sections(recipe: Recipe) -> None:
    """Raise `UserError` for fields of several sections that contradict each other."""
    training, average, tokenizer, data = recipe.training, recipe.average, recipe.tokenizer, recipe.data

    def reject(field: str, reason: str) -> NoReturn:
        raise UserError(f"{field} {reason}.", field=field)

    # training
    metric = training.metric_for_best_model.removeprefix("eval_")
    check_value("training.metric_for_best_model", metric, Literal[VALIDATION_METRICS])
    if metric not in ("loss", "perplexity"):
        if training.bleu_samples == 0:
            reject("training.metric_for_best_model", "requires training.bleu_samples above 0")
        if metric not in training.scorer.names:
            names = ", ".join(training.scorer.names)
            reject("training.metric_for_best_model", f"is not supported with training.text_metric; use {names}")
    try:
        higher_is_better(metric, training.greater_is_better)
    except UserError as error:
        raise error.inside("training") from error
    evaluating = {
        "training.early_stopping_patience": training.early_stopping_patience,
        "training.save_strategy": training.save_strategy == "best",
        "average.which": average.which == "best",
    }
    for name, value in evaluating.items():
        if value and training.eval_strategy == "no":
            reject(name, "requires evaluation during training: set training.eval_strategy to steps")
    if average.which == "best":
        saves, evaluates = training.save_strategy, training.eval_strategy
        save_steps, eval_steps = training.save_steps, training.eval_steps or training.logging_steps
        meet = is_multiple(save_steps, eval_steps) or is_multiple(eval_steps, save_steps)
        if saves not in ("best", evaluates) or (saves == "steps" and not meet):
            field = f"training.save_{'strategy' if saves != evaluates else 'steps'}"
            reject(field, "does not match training.eval_*: average.which=best needs an evaluation of each checkpoint")
        delay = training.others.get("eval_delay") or 0
        length = "max_steps" if evaluates == "steps" else "num_train_epochs"
        if 0 < (getattr(training, length) or 0) < delay:
            reject("training.eval_delay", f"is not supported with a lower training.{length} and average.which=best")
    keep = getattr(training, average.keep_option)
    if keep is not None and keep < average.count:
        reject(f"training.{average.keep_option}", f"is not supported with average.count={average.count}; raise it")
    steps = training.baseline_steps
    if steps is not None and recipe.model.init_from is not None:
        reject("training.baseline_steps", "is not supported with model.init_from, which is a trained baseline")
    if steps is not None and training.max_steps > 0:
        check_planned_steps(max(steps, 1), training.max_steps)
    elif steps is not None and steps < 1:
        reject("training.baseline_steps", "requires training.max_steps, because it is a share")
    # tokenizers
    origins = {"tokenizer.source": tokenizer.source, "model.init_from": recipe.model.init_from}
    given = next((name for name, value in origins.items() if value is not None), None)
    if tokenizer.tags and given is not None:
        reject("tokenizer.tags", f"is not supported with {given}; a given tokenizer keeps its own tags")
    if tokenizer.dropout > 0:
        kinds = {tokenizer.kind, tokenizer.target_kind or tokenizer.kind}
        if given is None and data.prepared is None and kinds != {"bpe"}:
            reject("tokenizer.dropout", "is not supported by this tokenizer. Use one of kind bpe, or set it to 0")
        if recipe.guides_alignment or any(corpus.has_trees for corpus in data.train):
            reject("tokenizer.dropout", "is not supported with alignments or dependency trees, which have own tokens")
    # corpora
    guided, default = recipe.guided_alignment, GuidedAlignment()
    if guided.weight > 0 and guided != default and not recipe.guides_alignment:
        name = next(name for name, value in vars(guided).items() if value != getattr(default, name))
        reject(f"guided_alignment.{name}", "requires alignments in data.train")
    for place, corpus in recipe.corpora:
        if corpus.alignments is not None and not place.startswith("data.train"):
            reject(f"{place}.alignments", "has no effect: only training reads links")
    for name, corpora in recipe.test.items():
        if len({corpus.target_tag for corpus in corpora}) > 1:
            reject(f"test.{name}", "has corpora with different target tags. Make a test set for each")


def check_planned_steps(baseline_steps: float, steps: int) -> None:
    """Raise `UserError` if the baseline's stage leaves no step for the variant."""
    if baseline_steps >= steps:
        raise UserError(
            f"training.baseline_steps={baseline_steps} must be below {steps}, the number of steps of both stages "
            "together. Raise training.max_steps.",
            field="training.baseline_steps",
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
