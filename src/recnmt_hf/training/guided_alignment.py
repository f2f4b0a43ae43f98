"""Guided alignment (Chen et al., 2016): a head of the cross-attention learns to link tokens as word alignments do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from torch import nn

from ..errors import UserError
from ..models.seq2seq_loss import divisor
from ..options import Range, check_options, check_value, documented, option


@documented
@dataclass
class GuidedAlignment:
    """Section `guided_alignment`: the loss of training corpora with `alignments`, for models of this package."""

    weight: Annotated[float, Range(least=0)] = option(0.1, "weight of the loss; 0: `alignments` are not read")
    layer: Annotated[int | None, Range(least=0)] = option(None, "decoder layer, counted from 0; null: the last one")
    head: Annotated[int, Range(least=0)] = option(0, "head of its cross-attention, counted from 0")

    def __post_init__(self) -> None:
        check_options(self)

    def place(self, config: Any) -> tuple[int, int]:
        """Return decoder layer and head. `UserError` if a model with this configuration does not have them."""
        if not getattr(config, "attends_source_words", True):
            raise UserError("The decoder does not attend to source words. Use a model whose decoder does.")
        layers, heads = config.decoder_layers, getattr(config, "decoder_attention_heads", 1)
        layer = layers - 1 if self.layer is None else self.layer
        check_value("guided_alignment.layer", layer, int, Range(least=0, most=layers - 1))
        check_value("guided_alignment.head", self.head, int, Range(least=0, most=heads - 1))
        return layer, self.head


class Means:
    """Means of the values of all batches and processes between two logs, by name."""

    def __init__(self, names: Iterable[str]):
        self.totals: dict[str, Any] = dict.fromkeys(names, 0.0)  # sum and number of values

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add the sum of `count` values."""
        self.totals[name] = self.totals[name] + torch.stack([total.detach().float(), count.float()])

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means since the last call; without those of no values."""
        means = {}
        for name, totals in self.totals.items():
            all_totals = torch.zeros(2, device=accelerator.device) + totals  # every process takes part
            total, count = accelerator.reduce(all_totals, reduction="sum").tolist()
            self.totals[name] = 0.0
            if count:
                means[name] = total / count
        return means


class AlignmentGuide:
    """
    Adds the loss `-p(i|j) log(a_ij + 1e-6)`, summed over links p and attention weights a, and divided like the model's
    own loss, to that of a model in training. Its inputs then include `links` `(batch_size, target_length,
    source_length)`, the probability p(i|j) of each source token i for a target token j.

    The model gets hooks. The weights of the head, without dropout, are computed from the inputs of its attention, in
    addition to the attention itself, so that no layer changes its implementation.
    """

    def __init__(self, model: Any, settings: GuidedAlignment):
        layer, self.head = settings.place(model.config)
        attention = model.get_decoder().source_attention(layer)
        self.weight = settings.weight
        self.links = self.token_mask = self.weights = None
        self.means = Means(["alignment_loss"])  # unweighted, of target tokens with links
        model.register_forward_pre_hook(self.take_links, with_kwargs=True)
        attention.register_forward_hook(self.compute_weights)
        model.register_forward_hook(self.add_loss, with_kwargs=True)

    def take_links(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Remove the links from a model's inputs and store them until the next call."""
        # The backward pass of gradient checkpointing calls the attention again, and must find the links.
        links = kwargs.pop("links", None)
        self.links = links if model.training else None
        self.token_mask, self.weights = kwargs.get("attention_mask"), None
        return args, kwargs

    def compute_weights(self, attention: Any, args: tuple[Any, ...], output: Any) -> None:
        """Store the weights of the head `(batch_size, target_length, source_length)`."""
        if self.links is None:
            return
        if hasattr(attention, "head_weights"):
            visible = None if self.token_mask is None else self.token_mask[:, None] != 0
            self.weights = attention.head_weights(self.head, *args[:2], visible)
        else:
            self.weights = output[1][:, self.head]

    def add_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Add the loss to that of a model's output."""
        if self.links is None or self.weights is None:
            return
        # As in Marian, 1e-6 bounds the loss of a link that the model misses.
        loss = -(self.links * torch.log(self.weights + 1e-6)).sum()
        output.loss = output.loss + self.weight * loss / divisor(kwargs["labels"], kwargs.get("num_items_in_batch"))
        self.means.add("alignment_loss", loss, self.links.sum())
