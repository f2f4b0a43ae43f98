"""The Trainer's arguments: transformers' and ours, with their ranges."""

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
from transformers import Seq2SeqTrainingArguments

from ..metrics.rouge import ROUGE_UNITS
from ..options import MOST_SEED, Option, Range, option, options_of
from .metrics import BLEU_TOKENIZERS, TEXT_METRICS, TextScorer, higher_is_better


_FRACTION = Range(least=0, below=1)
Count = Annotated[int, Range(least=1)]
# Ranges of transformers' arguments, which do not declare any.
TRANSFORMERS_RANGES = {
    name: allowed
    for names, allowed in (
        ("eval_steps save_steps logging_steps", Range(above=0, share=True)),
        ("warmup_steps", Range(least=0, share=True)),
        ("max_steps gradient_accumulation_steps eval_accumulation_steps torch_empty_cache_steps", Range(least=1)),
        ("per_device_train_batch_size per_device_eval_batch_size", Range(least=1)),
        ("generation_max_length generation_num_beams dataloader_prefetch_factor ddp_bucket_cap_mb", Range(least=1)),
        ("ddp_timeout", Range(least=1, most=10**9)),
        ("learning_rate", Range(least=0, most=10**6)),  # larger values are typing errors
        ("weight_decay max_grad_norm eval_delay neftune_noise_alpha", Range(least=0)),
        ("adam_beta1 adam_beta2 label_smoothing_factor", _FRACTION),
        ("num_train_epochs adam_epsilon", Range(above=0)),
        ("dataloader_num_workers", Range(least=0, most=1024)),
        ("seed data_seed", Range(least=0, most=MOST_SEED)),
    )
    for name in names.split()
}


@dataclass
class TranslationTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the fields below."""

    max_tokens: Count = option(4096, "maximum number of source or target tokens, with padding, in a batch of a device")
    max_sentences: Annotated[int | None, Range(least=1)] = option(None, "maximum number of sentences in a batch")
    max_squared_tokens: Annotated[int | None, Range(least=0)] = option(
        None,
        "maximum of sentences times squared length in a batch; 0: no limit; null: 64 * max_tokens for RNMT, else none",
    )
    optimizer: str | None = option(None, "adadelta (Zeiler, 2012) instead of optim", choices=(None, "adadelta"))
    adadelta_rho: Annotated[float, _FRACTION] = option(0.95, "decay of Adadelta's averages")
    adadelta_eps: Annotated[float, Range(above=0)] = option(1e-6, "constant added inside of Adadelta's square roots")
    text_metric: str = option(
        "bleu", "metric of generated text; rouge: ROUGE-1, -2 and -L", choices=tuple(TEXT_METRICS)
    )
    rouge_units: str = option("words", "units of ROUGE; english: words of letters a to z, stemmed", choices=ROUGE_UNITS)
    bleu_samples: Annotated[int, Range(least=0)] = option(500, "number of validation sentences to translate; 0: none")
    bleu_beams: Count = option(1, "beam size of the translations of the validation set")
    bleu_lowercase: bool = option(False, "case-insensitive BLEU, also of test sets")
    bleu_tokenize: str | None = option(
        None, "sacrebleu's tokenizer, also for test sets; null: by data.target_lang", choices=(None, *BLEU_TOKENIZERS)
    )
    keep_last: Count = option(5, "number of newest checkpoints to keep")
    keep_best: Annotated[int, Range(least=0)] = option(
        1, "number of best checkpoints to keep, by metric_for_best_model"
    )
    ema_decay: Annotated[float | None, Range(above=0, below=1)] = option(
        None, "decay of a moving average of the weights, which is evaluated and saved, e.g. 0.999; null: no average"
    )

    def __post_init__(self) -> None:
        for name, entry in training_options().items():
            has_limits = entry.allowed is not None or entry.choices is not None
            if has_limits and not (name == "max_steps" and self.max_steps == -1):  # -1: epochs decide
                setattr(self, name, entry.check(getattr(self, name)))
        if self.metric_for_best_model is not None:
            self.greater_is_better = higher_is_better(self.metric_for_best_model, self.greater_is_better)
        super().__post_init__()

    @property
    def device(self) -> torch.device:
        """Device; `cpu` without a number, because torch 2.6 cannot load the state of an optimizer to cpu:0."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def precision(self) -> str:
        """Mixed precision, also that of `accelerate launch`: `bf16`, `fp16`, ... or `no`."""
        own = "bf16" if self.bf16 else "fp16" if self.fp16 else None
        return own or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()

    @property
    def folder(self) -> Path:
        """Output folder; transformers sets it if it is not given."""
        assert self.output_dir is not None
        return Path(self.output_dir)

    @property
    def scorer(self) -> TextScorer:
        """Scorer of generated text."""
        return TextScorer(self.text_metric, self.rouge_units, self.bleu_lowercase, self.bleu_tokenize)


# Arguments that transformers does not have.
OWN_ARGUMENTS = tuple(TranslationTrainingArguments.__annotations__)


@cache
def training_options() -> dict[str, Option]:
    """Return the declarations of [`TranslationTrainingArguments`]' fields, with ranges for those of transformers."""
    options = {}
    for name, entry in options_of(TranslationTrainingArguments).items():
        choices = entry.choices if name in OWN_ARGUMENTS else None  # transformers' omit null, the default of some
        options[name] = replace(entry, allowed=entry.allowed or TRANSFORMERS_RANGES.get(name), choices=choices)
    return options
