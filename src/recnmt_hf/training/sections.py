"""The sections of recipes: fields, types, ranges and defaults."""

import sys
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Annotated, Any

import torch

from .._loading_errors import folder_of_model
from ..data.corpora import Corpus, parse_corpora
from ..data.text import ON_EMPTY, ON_LONG
from ..data.tokenization import SPECIAL_TOKENS, TOKENIZER_TYPES, check_tags
from ..errors import UserError, short_repr
from ..options import LANGUAGE, Range, check_options, documented, given_fields, option, options_of
from .arguments import training_options
from .building import MOST_SIZE
from .metrics import TEXT_METRICS


_LENGTH = Range(least=2, most=2**20)  # a word and the end token
_SYMBOLS = Range(least=5, most=MOST_SIZE)  # one beside the special tokens


@documented
@dataclass
class DataSection:
    """Section `data`: sentence pairs ([`~recnmt_hf.data.Corpus`] lists the fields), by default generated ones."""

    source_lang: str = option("en", "language code of the source")
    target_lang: str = option("de", "language code of the target")
    train: list[Corpus] = field(
        default_factory=lambda: [Corpus(generated="train")], metadata={"help": "corpora to train on"}
    )
    validation: list[Corpus] = field(
        default_factory=lambda: [Corpus(generated="validation")], metadata={"help": "corpora to evaluate on"}
    )
    on_empty: str = option("error", "treatment of pairs with an empty side", choices=ON_EMPTY)
    max_source_length: Annotated[int, _LENGTH] = option(256, "maximum number of source tokens of a training pair")
    max_target_length: Annotated[int, _LENGTH] = option(256, "maximum number of target tokens of a training pair")
    on_long: str = option(
        "skip",
        "skip or truncate longer training pairs; truncate applies to sources of validation and test sets, too",
        choices=ON_LONG,
    )
    max_length_ratio: Annotated[float | None, Range(least=1)] = option(None, "maximum ratio of the lengths of a pair")
    temperature: Annotated[float | None, Range(least=1, most=1000)] = option(
        None, "draw pairs from each corpus by its size to the power of 1 / temperature; null: read each pair once"
    )
    weights: list[float] | None = option(
        None, "how often each corpus is read in an epoch (prepared data only); a fraction reads a fixed part of it"
    )
    prepared: str | None = option(None, "folder that `recnmt prepare` wrote from this recipe, read instead of `train`")
    shard_size: Annotated[int, Range(least=1, most=10**7)] = option(100_000, "for `recnmt prepare`: lines of a shard")
    cache_dir: str | None = option(None, "folder for tokenized data; null: a subfolder of the output folder")
    num_proc: Annotated[int | None, Range(least=1, most=1024)] = option(None, "number of processes that tokenize")

    def __post_init__(self) -> None:
        for name in ("train", "validation"):
            setattr(self, name, parse_corpora(getattr(self, name), name))
        check_options(self)
        for name in ("source_lang", "target_lang"):
            language = getattr(self, name)
            if not LANGUAGE.fullmatch(language):
                raise UserError(f"{name}={short_repr(language)} is not a language code, such as zh-CN.", field=name)
        if self.weights is not None:
            is_in_range = len(self.weights) == len(self.train) and all(0 <= one <= 1000 for one in self.weights)
            if not is_in_range or not any(self.weights) or self.temperature:
                reason = f"must be {len(self.train)} numbers from 0 to 1,000, one for each corpus of data.train"
                raise UserError(f"weights={short_repr(self.weights)} {reason}, without temperature.", field="weights")
        for name in ("train", "validation"):
            for number, corpus in enumerate(getattr(self, name)):
                corpus.check_single_target(f"{name}[{number}]")


@documented
@dataclass
class TokenizerSection:
    """Section `tokenizer`. It is trained on the training corpora, unless `source` or `model.init_from` provides one."""

    kind: str = option("bpe", "source tokenizer; space: splits tokenized text at spaces", choices=TOKENIZER_TYPES)
    vocab_size: Annotated[int, _SYMBOLS] = option(8000, "number of source symbols, and of target symbols by default")
    target_kind: str | None = option(
        None, "kind of a separate target tokenizer; null: the source's", choices=(None, *TOKENIZER_TYPES)
    )
    target_vocab_size: Annotated[int | None, _SYMBOLS] = option(None, "number of target symbols; null: vocab_size")
    joint: bool = option(True, "one vocabulary for both sides")
    min_frequency: Annotated[int, Range(least=1)] = option(1, "minimum frequency of a symbol")
    lowercase: bool = option(False, "lowercase all text")
    byte_fallback: bool | None = option(None, "encode unknown characters as bytes (bpe); null: if vocab_size >= 1000")
    max_sentences: Annotated[int | None, Range(least=1)] = option(None, "maximum number of pairs that are read")
    tags: list[str] = field(default_factory=list, metadata={"help": "symbols that are never split, such as >>de<<"})
    dropout: Annotated[float, Range(least=0, below=1)] = option(
        0.0, "BPE dropout: probability of skipping a merge, drawn anew in each epoch; 0.1 is usual, 0 disables it"
    )
    relation_subtypes: bool = option(False, "distinguish subtypes of relations in trees, such as nsubj:pass and nsubj")
    source: str | None = option(None, "folder or model id of an existing source tokenizer")
    target: str | None = option(None, "folder or model id of an existing target tokenizer")

    def __post_init__(self) -> None:
        check_options(self)
        check_tags(self.tags, "tags", SPECIAL_TOKENS)
        has_own = self.target_kind or self.target_vocab_size or self.target
        if (self.joint and has_own) or (self.target and not self.source):
            reason = "target requires source; joint=true excludes target, target_kind and target_vocab_size."
            raise UserError(reason, field="joint" if self.joint else "target")
        for name in ("source", "target"):
            if (path := getattr(self, name)) is not None:
                setattr(self, name, folder_of_model(path))

    @property
    def existing(self) -> list[str]:
        """Existing tokenizers, one for both sides or one for each; empty if they are to be trained."""
        sources = [self.source] if self.joint else [self.source, self.target or self.source]
        return [source for source in sources if source is not None]

    @property
    def vocabularies(self) -> list[dict[str, Any]]:
        """Arguments of [`~recnmt_hf.data.train_tokenizer`], for both sides or for each."""
        sides = [(self.kind, self.vocab_size)]
        if not self.joint:
            sides.append((self.target_kind or self.kind, self.target_vocab_size or self.vocab_size))
        shared = {name: getattr(self, name) for name in ("min_frequency", "lowercase", "tags")}
        return [
            {"kind": kind, "vocab_size": size, "byte_fallback": self.byte_fallback if kind == "bpe" else None, **shared}
            for kind, size in sides
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """The fields as data in shards records them, whose texts are segmented without dropout."""
        return {**asdict(self), "dropout": 0.0}


@documented
@dataclass
class AverageSection:
    """Section `average`: the checkpoints whose average is the final model."""

    count: Annotated[int, Range(least=1, most=10000)] = option(5, "number of checkpoints")
    which: str = option("last", "the last checkpoints, or the best by metric_for_best_model", choices=("last", "best"))

    def __post_init__(self) -> None:
        check_options(self)


# Arguments of transformers without an effect here; a recipe may only switch them off.
NO_EFFECT = {
    *("output_dir", "resume_from_checkpoint", "local_rank", "do_train", "do_eval", "do_predict", "push_to_hub"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "save_total_limit", "load_best_model_at_end"),
    *("predict_with_generate", "generation_config", "generation_max_length", "generation_num_beams"),
    "use_liger_kernel",
}


@dataclass
class RunSection:
    """Fields of the section `training` besides those of [`~recnmt_hf.TranslationTrainingArguments`]."""

    early_stopping_patience: Annotated[int | None, Range(least=1)] = option(
        None, "number of evaluations without a better metric_for_best_model after which training ends"
    )
    baseline_steps: Annotated[float | None, Range(above=0, share=True)] = option(
        None, "number (or share) of max_steps of a first stage, for the plain model from which the variant starts"
    )


# Values of [`~recnmt_hf.TranslationTrainingArguments`] in recipes where their default is another one.
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
TRAINING_OPTIONS = {**training_options(), **options_of(RunSection)}


class TrainingSection:
    """Section `training`: fields of [`~recnmt_hf.TranslationTrainingArguments`] and [`RunSection`], as attributes."""

    values: dict[str, Any]  # the given ones, and the defaults of recipes

    def __init__(self, content: Any = None):
        given = given_fields(content, TRAINING_OPTIONS, "training")
        strategies = ("eval_strategy", "save_strategy", "logging_strategy")
        given |= {name: "no" for name in strategies if given.get(name) is False}
        if given.get("num_train_epochs") is not None:
            if given.get("max_steps") not in (None, -1):
                field = "training.num_train_epochs"
                raise UserError(f"{field} is not supported with training.max_steps. Remove one of them.", field=field)
            given["max_steps"] = -1
        if given.get("metric_for_best_model") is None:
            given.pop("metric_for_best_model", None)
        values = {**TRAINING_DEFAULTS, **given}
        for name, value in values.items():
            entry, place = TRAINING_OPTIONS[name], f"training.{name}"
            if name in NO_EFFECT and value not in (None, False, entry.default):
                raise UserError(f"{place} has no effect; use the fields of recipes and options.", field=place)
            if (name, value) != ("max_steps", -1) or values.get("num_train_epochs") is None:  # else epochs decide
                value = entry.check(value, place)
            values[name] = value.value if isinstance(value, Enum) else value
        if (values.get("baseline_steps") or 0) >= 1:
            values["baseline_steps"] = int(values["baseline_steps"])
        self.__dict__["values"] = values
        if "metric_for_best_model" not in given:
            self.metric_for_best_model = TEXT_METRICS[self.text_metric][-1] if self.bleu_samples > 0 else "loss"

    def __getattr__(self, name: str) -> Any:
        if name not in TRAINING_OPTIONS:
            raise AttributeError(name)
        return self.values.get(name, TRAINING_OPTIONS[name].default)

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainingSection) and self.values == other.values

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the run uses the CPU."""
        given = self.values.get("use_cpu")
        return not torch.accelerator.is_available() if given is None else bool(given)

    def trainer_settings(self) -> dict[str, Any]:
        """Return the arguments of [`~recnmt_hf.TranslationTrainingArguments`]."""
        settings = {"disable_tqdm": not sys.stderr.isatty(), **self.values, "use_cpu": self.runs_on_cpu}
        excluded = options_of(RunSection).keys() | NO_EFFECT | {"hub_token"}  # checkpoints store the arguments
        return {name: value for name, value in settings.items() if name not in excluded}
