"""Batches of the trainer as tensors, and predictions in the order of the data."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from datasets import Dataset
from transformers.trainer_utils import EvalLoopOutput

from ..data.alignments import collate_links
from ..data.languages import language_ids
from ..data.sharded import ShardedDataset
from ..data.tokenizer_pair import TokenizerPair
from ..data.tree_inputs import TreeCollator
from ..errors import UserError


def check_prepared(dataset: Any, name: str = "dataset") -> None:
    """Raise `UserError` for a dataset without lengths, such as a stream: batches by tokens need all lengths."""
    if isinstance(dataset, ShardedDataset):
        return
    needed = {"input_ids", "labels", "source_length", "target_length"}
    if not isinstance(dataset, Dataset) or not needed <= set(dataset.column_names):
        reason = f"must be a dataset of recnmt_hf.prepare_dataset, not a {type(dataset).__name__} without lengths"
        raise UserError(f"{name} {reason}.", field=name)


def in_order_of_data(output: EvalLoopOutput, batches: Iterable[list[int]]) -> EvalLoopOutput:
    """Sort predictions and labels, made in batches of similar lengths, by the rows of their dataset."""
    order = np.argsort(list(chain.from_iterable(batches)))
    predictions, labels = recursively_apply(
        lambda values: values[order] if len(values) == len(order) else values,  # else one value for each batch
        (output.predictions, output.label_ids),
        test_type=lambda value: isinstance(value, np.ndarray),
    )
    return output._replace(predictions=predictions, label_ids=labels)


def smooths_itself(model: torch.nn.Module | None) -> bool:
    """Return whether a model shifts and smooths labels in its own loss."""
    return bool(getattr(model, "computes_smoothed_loss", False))


class TranslationCollator(TreeCollator):
    """
    A collator that also makes the tensor of `links` ([`~recnmt_hf.data.alignments.collate_links`]), and the decoder's
    input for models of transformers that do not make it themselves. Labels that end in one of the tokens `languages`
    (of mBART, and of NLLB formerly) begin with it instead, as translations do.
    """

    languages: Collection[int] = ()

    def __call__(self, features: Any, return_tensors: str | None = None) -> Any:
        features = [dict(row) for row in features]
        for row in features if self.languages else ():
            if row["labels"][-1] in self.languages:
                row["labels"] = [row["labels"][-1], *row["labels"][:-1]]
                if "links" in row:  # source, target, source, target, ...
                    row["links"] = [position + number % 2 for number, position in enumerate(row["links"])]
        links = [row.pop("links") for row in features] if "links" in features[0] else None
        batch = super().__call__(features, return_tensors)
        if links is not None:
            batch["links"] = collate_links(links, batch)
        # The Trainer's label smoothing needs it, and M2M-100 has no method that makes it.
        if self.model is not None and "labels" in batch and "decoder_input_ids" not in batch:
            labels = batch["labels"]
            start = labels.new_full((len(labels), 1), self.model.config.decoder_start_token_id)
            shifted = torch.cat([start, labels[:, :-1]], dim=1)
            batch["decoder_input_ids"] = shifted.masked_fill(shifted == -100, self.tokenizer.pad_token_id)
        return batch


def collator_of(tokenizers: TokenizerPair, model: Any) -> TranslationCollator:
    """Return a collator that pads on the right, as shifting labels to the right requires."""
    tokenizer, target = tokenizers
    if tokenizer.padding_side != "right":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.padding_side = "right"
    collator = TranslationCollator(tokenizer, None if smooths_itself(model) else model)
    languages = language_ids(target).values()
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    if start is not None and start not in languages:  # else the decoder begins with the last token of the labels
        collator.languages = frozenset(languages)
    return collator
