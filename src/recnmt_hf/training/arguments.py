"""The Trainer's arguments: transformers' and ours, with their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import Seq2SeqTrainingArguments

from .._values import Option, Range, option, options_of, shown
from ..metrics.rouge import ROUGE_UNITS
from ..models.user_errors import UserError
from .metrics import TEXT_METRICS, TextScorer, higher_is_better


# Ranges of transformers' arguments, which declare none themselves.
_STEPS = Range(above=0, share=True)
_FRACTION = Range(least=0, below=1)
_SEED = Range(least=0, most=2**32 - 1)
TRANSFORMERS_RANGES: dict[str, Range] = {
    "num_train_epochs": Range(above=0),
    "max_steps": Range(least=1),
    "learning_rate": Range(least=0, most=10**6),  # larger values are typing errors
    "warmup_steps": Range(least=0, share=True),
    "weight_decay": Range(least=0),
    "adam_beta1": _FRACTION,
    "adam_beta2": _FRACTION,
    "adam_epsilon": Range(above=0),
    "max_grad_norm": Range(least=0),
    "label_smoothing_factor": _FRACTION,
    "gradient_accumulation_steps": Range(least=1),
    "eval_steps": _STEPS,
    "save_steps": _STEPS,
    "logging_steps": _STEPS,
    "eval_delay": Range(least=0),
    "per_device_train_batch_size": Range(least=1),
    "per_device_eval_batch_size": Range(least=1),
    "eval_accumulation_steps": Range(least=1),
    "torch_empty_cache_steps": Range(least=1),
    "neftune_noise_alpha": Range(least=0),
    "generation_max_length": Range(least=1),
    "generation_num_beams": Range(least=1),
    "dataloader_num_workers": Range(least=0, most=1024),
    "dataloader_prefetch_factor": Range(least=1),
    "ddp_bucket_cap_mb": Range(least=1),
    "ddp_timeout": Range(least=1),
    "seed": _SEED,
    "data_seed": _SEED,
}


@dataclass
class TranslationTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the fields below."""

    max_tokens: Annotated[int, Range(least=1)] = option(
        4096, "source tokens, and target tokens, of a batch on one device, padding included"
    )
    max_sentences: Annotated[int | None, Range(least=1)] = option(None, "most sentences of a batch")
    max_squared_tokens: Annotated[int | None, Range(least=0)] = option(
        None,
        "most sentences times squared source length of a batch; null: any number, but for a model that compares all "
        "pairs of words (RNMT) 64 max_tokens, so that batches of sentences longer than 64 tokens get smaller; 0: any "
        "number for that too",
    )
    optimizer: str | None = option(None, "adadelta (Zeiler, 2012) in place of what optim names")
    adadelta_rho: Annotated[float, _FRACTION] = option(0.95, "decay of Adadelta's averages")
    adadelta_eps: Annotated[float, Range(above=0)] = option(1e-6, "added under Adadelta's roots")
    text_metric: str = option(
        "bleu",
        "what measures the text generated for validation and test sets; rouge: F1 of ROUGE-1, ROUGE-2 and ROUGE-L, for "
        "summaries",
        choices=tuple(TEXT_METRICS),
    )
    rouge_units: str = option(
        "words", "what ROUGE counts; english: letters a to z with Porter's stemmer", choices=ROUGE_UNITS
    )
    bleu_samples: Annotated[int, Range(least=0)] = option(
        500, "validation sentences translated for BLEU or ROUGE; 0 switches it off"
    )
    bleu_beams: Annotated[int, Range(least=1)] = option(1, "beam size of that translation")
    bleu_lowercase: bool = option(False, "case-insensitive BLEU, of the test sets too")
    keep_last: Annotated[int, Range(least=1)] = option(5, "newest checkpoints kept")
    keep_best: Annotated[int, Range(least=0)] = option(1, "best checkpoints kept, by metric_for_best_model")

    def __post_init__(self) -> None:
        for name, entry in training_options().items():
            has_limits = entry.allowed is not None or entry.choices is not None
            if has_limits and not (name == "max_steps" and self.max_steps == -1):  # -1: epochs decide
                setattr(self, name, entry.check(getattr(self, name)))
        if self.metric_for_best_model is not None:
            self.greater_is_better = higher_is_better(self.metric_for_best_model, self.greater_is_better)
        super().__post_init__()
        if self.dataloader_persistent_workers and not self.dataloader_num_workers:
            raise UserError(
                "dataloader_persistent_workers=True needs dataloader_num_workers >= 1, got 0. Remedy: set "
                "dataloader_num_workers, or leave dataloader_persistent_workers out."
            )
        if self.optimizer not in (None, "adadelta"):
            raise UserError(
                f"optimizer={self.optimizer!r} is not allowed; it must be adadelta. Remedy: leave it out and name "
                "transformers' optimizers in optim, e.g. optim=adamw_torch."
            )

    @property
    def device(self) -> torch.device:
        """As in transformers, but `cpu` has no number: torch 2.6 cannot load an optimizer's state to cpu:0."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def folder(self) -> Path:
        """Output folder; transformers chooses one if none is given."""
        assert self.output_dir is not None
        return Path(self.output_dir)

    @property
    def best_is_highest(self) -> bool:
        """Whether more of `metric_for_best_model` is better."""
        return self.greater_is_better is not False

    @property
    def scorer(self) -> TextScorer:
        """How generated text is scored."""
        return TextScorer(self.text_metric, self.rouge_units, self.bleu_lowercase)


# Arguments that transformers does not have.
OWN_ARGUMENTS = tuple(TranslationTrainingArguments.__annotations__)


@cache
def training_options() -> dict[str, Option]:
    """Return the declarations of [`TranslationTrainingArguments`]' fields, with ranges for those of transformers."""
    return {
        # Transformers' choices omit null, the default of some.
        name: replace(
            entry,
            allowed=entry.allowed or TRANSFORMERS_RANGES.get(name),
            choices=entry.choices if name in OWN_ARGUMENTS else None,
        )
        for name, entry in options_of(TranslationTrainingArguments).items()
    }


def make_arguments(settings: Mapping[str, Any], output_dir: Path) -> TranslationTrainingArguments:
    """
    Make the Trainer's arguments from settings of a recipe.

    Raises:
        UserError: Transformers rejects a setting; the message names it.
    """
    try:
        return TranslationTrainingArguments(output_dir=str(output_dir), **settings)
    except UserError as error:
        raise UserError(f"training.{error}") from error
    except Exception as error:  # of any library that transformers passes a value to
        what = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"{rejected(settings, output_dir)}: {what}. Remedy: correct it, or leave it out.") from error


def rejected(settings: Mapping[str, Any], output_dir: Path) -> str:
    """Name the settings, with their values, that are wrong: without any one of them the arguments can be made."""
    names = []
    for name, value in settings.items():
        others = {other: settings[other] for other in settings if other != name}
        try:
            TranslationTrainingArguments(output_dir=str(output_dir), **others)
        except Exception:
            continue
        names.append(f"training.{name}={shown(value)}")
    return ", ".join(names) or "training"
