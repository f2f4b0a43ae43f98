"""Recipes: one YAML file says everything about a training run."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ..data.corpora import Corpus
from ..data.files import open_output
from ..data.tokenization import TOKENIZER_TYPES
from ..evaluation.translator import DecodingOptions
from ..models.user_errors import MissingFileError, UserError
from .trainer import TranslationTrainingArguments


GENERATED = {"train": [{"generated": "train"}], "validation": [{"generated": "validation"}]}


@dataclass
class ModelSection:
    """
    Which model.

    Args:
        type (`str`, *optional*, defaults to `"nmt_transformer"`): Its `model_type`.
        preset (`str`, *optional*, defaults to `"small"`): Its size.
        fields (`dict`, *optional*): Configuration fields in place of the preset's.
        init_from (`str`, *optional*): A trained baseline to start from (`init_from_baseline`), with its tokenizers.
    """

    type: str = "nmt_transformer"
    preset: str = "small"
    fields: dict[str, Any] = field(default_factory=dict)
    init_from: str | None = None


@dataclass
class DataSection:
    """
    Which sentence pairs; see [`~recnmt_hf.data.Corpus`] for what an entry of `train` and `validation` may say.

    Args:
        source_lang, target_lang (`str`): Language codes.
        train, validation (`list`): Corpora; the generated ones by default.
        on_empty (`str`, *optional*, defaults to `"error"`): `"error"` or `"skip"`.
        max_source_length, max_target_length (`int`): Longer training pairs (in tokens) are left out; validation pairs
            only beyond the model's positions.
        max_length_ratio (`float`, *optional*): Training pairs with lengths further apart are left out.
        cache_dir (`str`, *optional*): Where prepared data is kept; `None`: in the output folder.
        num_proc (`int`, *optional*): Processes that tokenize.
    """

    source_lang: str = "en"
    target_lang: str = "de"
    train: list[dict[str, Any]] = field(default_factory=lambda: list(GENERATED["train"]))
    validation: list[dict[str, Any]] = field(default_factory=lambda: list(GENERATED["validation"]))
    on_empty: str = "error"
    max_source_length: int = 256
    max_target_length: int = 256
    max_length_ratio: float | None = None
    cache_dir: str | None = None
    num_proc: int | None = None


@dataclass
class TokenizerSection:
    """
    Which tokenizer, trained on the training corpora unless `source` names one or `model.init_from` brings its own.

    Args:
        kind (`str`, *optional*, defaults to `"bpe"`): `"bpe"`, `"word"`, `"space"` (what spaces part, for text that
            is tokenised already) or `"character"`.
        vocab_size (`int`, *optional*, defaults to 8000): Symbols of the source, and of the target unless
            `target_vocab_size` is given.
        target_kind (`str`, *optional*): Of the target where it differs; not with `joint`.
        target_vocab_size (`int`, *optional*): Likewise.
        joint (`bool`, *optional*, defaults to `True`): One vocabulary for both sides.
        min_frequency (`int`, *optional*, defaults to 1): Rarer symbols are left out.
        lowercase (`bool`, *optional*, defaults to `False`): Drops case.
        byte_fallback (`bool`, *optional*): Whether BPE writes what it does not know in bytes, 256 symbols of the
            vocabulary; `None`: from 1000 symbols on.
        max_sentences (`int`, *optional*): Most sentence pairs to train it on.
        source, target (`str`, *optional*): Folders or model ids of existing tokenizers.
    """

    kind: str = "bpe"
    vocab_size: int = 8000
    target_kind: str | None = None
    target_vocab_size: int | None = None
    joint: bool = True
    min_frequency: int = 1
    lowercase: bool = False
    byte_fallback: bool | None = None
    max_sentences: int | None = None
    source: str | None = None
    target: str | None = None


@dataclass
class AverageSection:
    """
    Which checkpoints make the final model.

    Args:
        count (`int`, *optional*, defaults to 5): How many; 1 takes a single one.
        which (`str`, *optional*, defaults to `"last"`): `"last"`, or `"best"` by `metric_for_best_model`.
    """

    count: int = 5
    which: str = "last"


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
    "greater_is_better": True,
    "report_to": "none",
    "restore_callback_states_from_checkpoint": True,
    "ddp_find_unused_parameters": False,
    "seed": 1,
}


@dataclass
class Recipe:
    """
    A training run.

    Args:
        model, data, tokenizer, average: The sections above, as objects or mappings.
        training (`dict`): Fields of [`TranslationTrainingArguments`], with `early_stopping_patience` (evaluations
            without a better `metric_for_best_model`) beside them.
        decoding (`dict`): Fields of [`~recnmt_hf.evaluation.DecodingOptions`]: how the finished model is tested.
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
        for name, kind in (
            ("model", ModelSection),
            ("data", DataSection),
            ("tokenizer", TokenizerSection),
            ("average", AverageSection),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                setattr(self, name, section(kind, value, name))
        given = mapping(self.training, "training")
        self.training = {**TRAINING_DEFAULTS, **given}
        if "num_train_epochs" in given and "max_steps" not in given:
            self.training["max_steps"] = -1  # epochs decide
        known = {f.name for f in fields(TranslationTrainingArguments) if f.init} | {"early_stopping_patience"}
        check_names(self.training, known, "training")
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            if self.training.get(name) is False:  # what YAML makes of an unquoted no
                self.training[name] = "no"
        self.decoding = mapping(self.decoding, "decoding")
        check_names(self.decoding, {f.name for f in fields(DecodingOptions)}, "decoding")
        # A recipe that extends another drops a test set of that one by null.
        self.test = {name: corpora for name, corpora in mapping(self.test, "test").items() if corpora is not None}
        self.check()

    def check(self) -> None:
        DecodingOptions(**self.decoding)
        for kind in (self.tokenizer.kind, self.tokenizer.target_kind or self.tokenizer.kind):
            if kind not in TOKENIZER_TYPES:
                raise UserError(f"tokenizer.kind={kind!r} is not allowed; choose one of {', '.join(TOKENIZER_TYPES)}.")
        separate = self.tokenizer.target_kind or self.tokenizer.target_vocab_size or self.tokenizer.target
        if self.tokenizer.joint and separate:
            raise UserError(
                "tokenizer.joint=true leaves no place for a target tokenizer of its own. Remedy: set tokenizer.joint: "
                "false, or remove target, target_kind and target_vocab_size."
            )
        if self.average.which not in ("last", "best") or self.average.count < 1:
            raise UserError(
                f"average: count={self.average.count}, which={self.average.which!r} is not allowed; count must be at "
                'least 1 and which "last" or "best".'
            )
        for name, corpora in (("train", self.data.train), ("validation", self.data.validation), *self.test.items()):
            for corpus in [corpora] if isinstance(corpora, Mapping) else corpora:
                try:
                    Corpus.from_any(corpus)
                except ValueError as error:
                    raise UserError(f"data, {name}: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """
        Reads a YAML file, with changes on top.

        A file may say `extends: other.yaml` (relative to itself) and then just what differs: sections and mappings are
        merged field by field, everything else is replaced.

        Args:
            path (`str` or `Path`): The file. Other relative file names in it are relative to the working directory.
            overrides (sequence of `str`): `section.field=value`; values are read as YAML.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no YAML mapping, or an override has no `=`.
        """
        path = Path(path)
        content = read_recipe(path)
        for override in overrides:
            name, equals, value = override.partition("=")
            if not equals:
                raise UserError(f"{override!r} is no override. Remedy: write section.field=value.")
            place = content
            *parents, last = name.split(".")
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise UserError(f"{name} cannot be set: {parent} is not a section of {path}.")
            place[last] = load_yaml(value)
        check_names(content, {f.name for f in fields(cls)}, "the recipe")
        return cls(**content)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Writes the recipe with all defaults filled in."""
        with open_output(path) as file:
            file.write(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))


def read_recipe(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The content of a recipe's file, on top of the one it extends."""
    if not path.is_file():
        near = ", ".join(sorted(other.name for other in path.parent.glob("*.yaml"))) or "no YAML file"
        raise MissingFileError(f"There is no recipe {path}; {path.parent} holds {near}. Remedy: correct the path.")
    if path.resolve() in extended_by:
        raise UserError(f"{path} extends itself. Remedy: correct its line `extends`.")
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no valid YAML ({' '.join(str(error).split())}). Remedy: correct it.") from error
    content = mapping(content if content is not None else {}, str(path))
    extended = content.pop("extends", None)
    if extended is None:
        return content
    if not isinstance(extended, str):
        raise UserError(f"{path}: extends must be the name of one file, not {extended!r}.")
    return merged(read_recipe(path.parent / extended, (*extended_by, path.resolve())), content)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` on top of `below`; mappings are merged, other values replaced."""
    result = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result


class _Loader(yaml.SafeLoader):
    """YAML with numbers such as 5e-4, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_yaml(text: str) -> Any:
    """A YAML document or value."""
    return yaml.load(text, Loader=_Loader)


def mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name} must be a mapping of names to values, not {value!r}.")
    return dict(value)


def section(kind: type, value: Any, name: str) -> Any:
    value = mapping(value if value is not None else {}, name)
    check_names(value, {f.name for f in fields(kind)}, name)
    return kind(**value)


def check_names(value: Mapping[str, Any], known: set[str], place: str) -> None:
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(sorted(known)[:12])} ..."
            raise UserError(f"{place} has no field {name!r}; {hint}")
