"""Exponential moving average of the weights during training (Kingma and Ba, 2015, section 7.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


# File of a checkpoint with the weights that training continues from; its model.safetensors has the average.
TRAINED = "trained_weights.pt"


class MovingAverage(TrainerCallback):
    """
    Callback that keeps the moving average `a <- decay * a + (1 - decay) * w` of a model's weights after each update,
    from those of the first update on. Evaluations and checkpoints of [`~recnmt_hf.TranslationTrainer`] have it.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.model = model
        self.update = get_ema_multi_avg_fn(decay)
        # Not torch's AveragedModel, which copies the model with its hooks, and what these refer to.
        self.average: list[torch.Tensor] | None = None

    def weights(self) -> list[torch.Tensor]:
        """Return the model's present weights, without copying them."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def start(self) -> None:
        """Start an average of the model's present weights."""
        self.average = [weight.clone() for weight in self.weights()]

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.average is None:
            self.start()
        else:
            self.update(self.average, self.weights(), None)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.average = None  # the Trainer gave the model an earlier average

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average's weights in a context."""
        if self.average is None:  # before the first update
            yield
            return
        before = [weight.clone() for weight in self.weights()]
        try:
            copy_values(self.weights(), self.average)
            yield
        finally:
            copy_values(self.weights(), before)

    def save_trained(self, folder: Path) -> None:
        """Write the weights that are trained into a checkpoint."""
        torch.save({name: value.detach() for name, value in self.model.named_parameters()}, folder / TRAINED)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint whose average the model has already."""
        self.start()
        trained = torch.load(folder / TRAINED, map_location="cpu", weights_only=True)
        own = dict(self.model.named_parameters())
        copy_values(list(own.values()), [trained[name] for name in own])


@torch.no_grad()
def copy_values(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values into parameters."""
    for parameter, value in zip(to, values, strict=True):
        parameter.copy_(value)
