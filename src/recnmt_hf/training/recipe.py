"""Recipes: a YAML file describes a training run, and is parsed and checked once into typed sections."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ..data.corpora import Corpus, parse_corpora
from ..data.files import open_output
from ..errors import UserError, short_repr
from ..inference.options import TEXT_OPTIONS, DecodingOptions
from ..metrics.bleu import bleu_tokenizer
from ..options import DEFAULT, check_value, given_fields, mapping, options_of, parse, stated
from .building import ModelSection
from .guided_alignment import GuidedAlignment
from .metrics import TEXT_METRICS
from .recipe_yaml import apply_overrides, dump_yaml, read_recipe
from .sections import AverageSection, DataSection, TokenizerSection, TrainingSection


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
        for name, entry in options_of(Recipe).items():
            if name not in ("training", "test") and not isinstance(getattr(self, name), entry.hint):
                setattr(self, name, parse(entry.hint, getattr(self, name), name))
        if not isinstance(self.training, TrainingSection):
            self.training = TrainingSection(self.training)
        tokenizer = bleu_tokenizer(self.data.target_lang)
        if (self.training.text_metric, self.training.bleu_tokenize) == ("bleu", None) and tokenizer != "13a":
            self.training.bleu_tokenize = tokenizer  # recorded with the run, whose scores depend on it
        for name in TEXT_OPTIONS:
            if name in stated(self.decoding):
                raise UserError(f"decoding.{name} is not supported for test sets.", field=f"decoding.{name}")
        if self.data.on_long == "truncate":
            given = {"on_long": "truncate", "max_source_length": self.data.max_source_length, **stated(self.decoding)}
            self.decoding = parse(DecodingOptions, given, "decoding")
        if isinstance(self.test, list):  # of test sets of sacrebleu
            sets = [(number, *parse_corpora(corpus, f"test[{number}]")) for number, corpus in enumerate(self.test)]
            self.test = {check_value(f"test[{n}].sacrebleu", c.sacrebleu, str).replace("/", "_"): c for n, c in sets}
        given_sets = mapping(self.test, "test").items()  # `null` drops a test set of an extended recipe
        tests = {name_of_test(name): corpora for name, corpora in given_sets if corpora not in (None, DEFAULT)}
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
        return cls(**given_fields(apply_overrides(read_recipe(Path(path)), overrides), SECTIONS))

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as a mapping with all defaults, as YAML has it."""
        corpora = {name: [stated(corpus) for corpus in getattr(self.data, name)] for name in ("train", "validation")}
        tests = {name: [stated(corpus) for corpus in corpora] for name, corpora in self.test.items()}
        return {
            "model": asdict(self.model),
            "data": {**asdict(self.data), **corpora},
            "tokenizer": asdict(self.tokenizer),
            "training": copy.deepcopy(self.training.values),
            "decoding": copy.deepcopy(stated(self.decoding)),
            "average": asdict(self.average),
            "guided_alignment": asdict(self.guided_alignment),
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
    start, guided, steps = recipe.model.init_from, recipe.guided_alignment, training.baseline_steps

    def require(holds: bool, field: str, reason: str) -> None:
        if not holds:
            raise UserError(f"{field} {reason}.", field=field)

    # evaluations
    metric = training.metric_for_best_model.removeprefix("eval_")
    of_text = TEXT_METRICS[training.text_metric] if training.bleu_samples > 0 else ()
    check_value("training.metric_for_best_model", metric, Literal[("loss", "perplexity", *of_text)])
    uses_best = average.which == "best"
    evaluates, reason = training.eval_strategy != "no", "requires evaluations: set training.eval_strategy to steps"
    require(evaluates or not training.early_stopping_patience, "training.early_stopping_patience", reason)
    require(evaluates or training.save_strategy != "best", "training.save_strategy", reason)
    require(evaluates or not uses_best, "average.which", reason)
    if uses_best and training.save_strategy != "best":
        reason = "does not match training.eval_*: average.which=best needs an evaluation of each checkpoint"
        require(training.save_strategy == training.eval_strategy, "training.save_strategy", reason)
        save_steps, eval_steps = training.save_steps, training.eval_steps or training.logging_steps
        meet = is_multiple(save_steps, eval_steps) or is_multiple(eval_steps, save_steps)
        require(training.save_strategy != "steps" or meet, "training.save_steps", reason)
    keep = "keep_best" if uses_best else "keep_last"
    enough = (training.values.get(keep) or average.count) >= average.count
    require(enough, f"training.{keep}", f"is below average.count={average.count}")
    # two stages
    if steps is not None:
        require(start is None, "training.baseline_steps", "is not supported with model.init_from, a trained baseline")
        is_known = steps >= 1 or training.max_steps > 0
        require(is_known, "training.baseline_steps", "requires training.max_steps, because it is a share")
        if training.max_steps > 0:
            check_planned_steps(max(steps, 1), training.max_steps)
    # tokenizers and corpora
    given = start if tokenizer.source is None else tokenizer.source
    require(not tokenizer.tags or given is None, "tokenizer.tags", f"is not supported with the tokenizer of {given}")
    if tokenizer.dropout > 0:
        kinds = {tokenizer.kind, tokenizer.target_kind or tokenizer.kind}
        is_bpe = given is not None or data.prepared is not None or kinds == {"bpe"}
        has_own_tokens = recipe.guides_alignment or any(corpus.has_trees for corpus in data.train)
        reason = "requires tokenizers of kind bpe, and no alignments or dependency trees"
        require(is_bpe and not has_own_tokens, "tokenizer.dropout", reason)
    has_effect = guided.weight == 0 or guided == GuidedAlignment() or recipe.guides_alignment
    require(has_effect, "guided_alignment", "requires alignments in data.train")
    for place, corpus in recipe.corpora:
        is_read = corpus.alignments is None or place.startswith("data.train")
        require(is_read, f"{place}.alignments", "has no effect: only training reads links")
    for name, corpora in recipe.test.items():
        tags = {corpus.target_tag for corpus in corpora}
        require(len(tags) < 2, f"test.{name}", "has several target tags; make a test set for each")


def check_planned_steps(baseline_steps: float, steps: int) -> None:
    """Raise `UserError` if the baseline's stage leaves no step for the variant."""
    if baseline_steps >= steps:
        field = "training.baseline_steps"
        raise UserError(f"{field}={baseline_steps} must be below the {steps} steps of both stages.", field=field)


def is_multiple(steps: float, of: float) -> bool:
    """Return whether one number of steps is a multiple of another; both may be shares of all steps."""
    return (steps < 1) == (of < 1) and abs(steps / of - round(steps / of)) < 1e-9 and steps >= of


def name_of_test(name: Any) -> str:
    """Check the name of a test set, which may be a number, and return it as text."""
    text = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
    if not isinstance(text, str) or not NAME_OF_A_TEST_SET.fullmatch(text) or text in RESERVED_NAMES:
        allowed = f"letters, digits, _, - and ., and not be {' or '.join(RESERVED_NAMES)}"
        raise UserError(f"{short_repr(name)} must have {allowed}.", field="test")
    return text
