"""
Lexical shortlists (Jean et al., 2015): the target tokens that the output layer computes for a batch, chosen by the
tokens of its sources. The files are those of Marian's option `--shortlist`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..data.records import TokenRows
from ..data.text import read_lines
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError
from ..models.kernels_cpu_matmuls import pack_weights, project
from ..models.seq2seq_outputs import CACHE
from .quantization import Int8Linear
from .search import ModelRows


logger = logging.get_logger(__name__)

# A warning reports lines of other vocabularies above this share.
OTHER_SHARE = 0.1


class Shortlist:
    """
    The likeliest translations of each source token.

    Args:
        translations (mapping of `int` to sequence of `int`): Target tokens of each source token, likeliest first.
        always (sequence of `int`): Target tokens that every batch may use.
        copies (`bool`): Whether the source tokens themselves are target tokens, as with one vocabulary for both.
    """

    def __init__(self, translations: Mapping[int, Sequence[int]], always: Sequence[int], copies: bool = False):
        self.translations, self.always, self.copies = translations, always, copies

    @classmethod
    def read(cls, path: str | Path, tokenizers: TokenizerPair, first: int, best: int) -> Shortlist:
        """
        Read lines of `target source probability`, separated by spaces. Lines with a token that is not in its vocabulary
        are ignored, with a warning if they are more than a tenth.

        Args:
            path (`str` or `Path`): The file, plain or compressed.
            tokenizers ([`~recnmt_hf.TokenizerPair`]): Give the ids of the tokens.
            first (`int`): Number of first tokens of the target vocabulary that every batch may use.
            best (`int`): Number of translations of each source token.
        """
        source_ids, target_ids = tokenizers.source.get_vocab(), tokenizers.target.get_vocab()
        found: dict[int, list[tuple[float, int]]] = defaultdict(list)
        number = others = 0
        for number, line in enumerate(read_lines(path), start=1):
            place, parts = f"{path}, line {number}", line.split(" ")
            try:
                target, source, probability = parts[0], parts[1], float(parts[2])
            except (IndexError, ValueError):
                probability = math.nan
            if not 0 <= probability <= 1:
                raise UserError("not a line of a shortlist: `target source probability`.", field=place)
            if source in source_ids and target in target_ids:
                found[source_ids[source]].append((-probability, target_ids[target]))
            else:
                others += 1
        if not found:
            raise UserError("none of its tokens is in the vocabularies of this model.", field=path)
        if others > OTHER_SHARE * number:
            logger.warning(
                f"{others} of {number} lines of {path} have tokens that this model lacks, and are ignored; was it made "
                "for another model?"
            )
        translations = {source: [id for _, id in sorted(targets)[:best]] for source, targets in found.items()}
        always = [*range(min(first, len(target_ids))), *tokenizers.target.all_special_ids]
        return cls(translations, always, copies=source_ids == target_ids)

    def tokens(self, sources: TokenRows, further: TokenRows = ()) -> list[int]:
        """Return the ids of the target tokens for a batch of sources, in their order, with those of `further`."""
        chosen = set(self.always).union(*(row.ids for row in further))
        given = {id for source in sources for id in source.ids}
        for id in given:
            chosen.update(self.translations.get(id, ()))
        if self.copies:
            chosen |= given
        return sorted(chosen)


class ShortlistRows(ModelRows):
    """Rows whose output layer has the target tokens of a shortlist only; `columns` are their ids."""

    def __init__(self, model: Any, inputs: dict[str, Any], rows: int, sentences: int, tokens: Sequence[int]):
        super().__init__(model, inputs, rows, sentences)
        self.columns = torch.tensor(tokens, device=model.device)
        weight, bias = output_weight(model.lm_head)
        self.vocabulary = weight.shape[0]
        layer: Any = nn.Linear(weight.shape[1], len(tokens), bias=False, device="meta")
        layer.weight = nn.Parameter(weight.index_select(0, self.columns), requires_grad=False)
        if weight.is_cpu:
            pack_weights(layer)
        self.layer: nn.Module = layer
        biases = [bias, getattr(model, "final_logits_bias", None)]
        self.biases = [bias.detach().reshape(-1)[self.columns] for bias in biases if bias is not None]

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = self.model.model(
            decoder_input_ids=tokens, use_cache=True, return_dict=True, **{CACHE: self.cache}, **self.inputs
        )
        self.cache = getattr(outputs, CACHE)
        logits = project(self.layer, outputs.last_hidden_state[:, -1])
        return sum(self.biases, start=logits).float()


def output_weight(head: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of an output layer; of a quantized one in float32."""
    if type(head) is nn.Linear:
        return head.weight.detach(), head.bias
    return head.weight().dequantize(), head.bias()


def has_linear_output(model: Any) -> bool:
    """Return whether the logits of a model are those of a linear layer over its decoder's states."""
    return hasattr(model, "model") and type(getattr(model, "lm_head", None)) in (nn.Linear, Int8Linear)
