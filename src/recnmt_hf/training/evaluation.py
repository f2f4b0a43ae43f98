"""Evaluations of a [`~recnmt_hf.TranslationTrainer`]: loss of target tokens, and BLEU or ROUGE of generated text."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from ..data.tags import split_tags
from ..data.trees import sentences_of_columns
from ..inference.backends.torch_model import TorchBackend
from ..inference.translator import Translator
from ..metrics.bleu import MetricScore
from .testing import translate_segments


def evaluate(trainer: Any, dataset: Dataset) -> dict[str, float]:
    """Return loss, perplexity and, if the dataset has its text, the scores of generated text."""
    model = trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model
    model.eval()
    loss = token_loss(trainer, model, dataset)
    metrics = {"loss": loss, "perplexity": math.exp(min(loss, 50.0))}
    if trainer.args.bleu_samples > 0 and "target" in dataset.column_names:
        metrics |= {name: score.score for name, score in sample_scores(trainer, dataset).items()}
    return metrics


@torch.no_grad()
def token_loss(trainer: Any, model: torch.nn.Module, dataset: Dataset) -> float:
    """Return the mean negative log-likelihood of a target token, unsmoothed."""
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    # The sum needs float64, which not every device has.
    device = torch.device("cpu") if trainer.args.device.type == "mps" else trainer.args.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    # Every process takes every world-th batch, and for sharding as many as the others.
    batches = list(trainer.get_eval_dataloader(dataset))
    rounds = math.ceil(len(batches) / world)
    for turn in range(rounds):
        index = turn * world + rank
        inputs = trainer._prepare_inputs(batches[min(index, len(batches) - 1)])
        tokens = (inputs["labels"] != -100).sum()
        settings = {"return_logits": False} if trainer.smooths_itself else {}
        with trainer.compute_loss_context_manager():
            loss = model(**inputs, **settings).loss  # a mean over the batch's tokens
        if index < len(batches):
            total += torch.stack([loss * tokens, tokens.to(loss.dtype)]).to(device).double()
    total = trainer.accelerator.reduce(total, reduction="sum")
    return (total[0] / total[1]).item()


def sample_scores(trainer: Any, dataset: Dataset) -> dict[str, MetricScore]:
    """Return BLEU or ROUGE of the first `bleu_samples` sentences, distributed over the processes."""
    sample = dataset.select(range(min(trainer.args.bleu_samples, len(dataset))))
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    own = list(range(rank, len(sample), world))
    model = trainer.accelerator.unwrap_model(trainer.model)
    translator = Translator.from_backend(TorchBackend(model, trainer.tokenizers, check=False))
    sources = sentences_of_columns(sample["source"][:], sample[:])
    tags, references = zip(*(split_tags(text, trainer.tokenizers.target) for text in sample["target"][:]), strict=True)
    codes = [sample[name][:] for name in ("source_lang", "target_lang") if name in sample.column_names]
    languages: Any = list(zip(*codes, strict=True)) or [()] * len(sample)
    texts, prefixes, codes = ([column[i] for i in own] for column in (sources, tags, languages))
    translations = translate_segments(translator, texts, prefixes, codes, trainer.validation_options)
    pairs = list(zip(own, translations, strict=True))
    pairs = sorted(gather_object(pairs)) if world > 1 else pairs
    return trainer.args.scorer.scores([text for _, text in pairs], references)
