"""Callbacks of the trainer: stages, annealing, means of outputs, moving average of the weights, time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from ..data.batching import TokenBatchSampler
from .processes import logger


# File of a checkpoint with the weights that training continues from; its model.safetensors has the moving average.
TRAINED = "trained_weights.pt"


class RunCallback(TrainerCallback):
    """
    Callback of a [`~recnmt_hf.TranslationTrainer`] for token samplers, resumed runs, stages, and losses that are not
    finite.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)  # intervals of a resumed run are those of its own arguments
        self.trainer.steps_before = state.global_step
        if state.global_step > self.trainer.first_step:
            args.eval_on_start = False  # the checkpoint was evaluated; early stopping would count it again
        if state.global_step == self.trainer.first_step > 0:  # the variant has a best checkpoint of its own
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        sampler = self.trainer.train_sampler  # accelerate's wrappers do not pass the epoch on
        assert sampler is not None
        epoch, steps = divmod(state.global_step, self.trainer.updates_of(sampler))
        sampler.set_epoch(epoch)
        if self.trainer.resegmented is not None:
            self.trainer.resegmented.set_epoch(epoch)
        if not isinstance(sampler, TokenBatchSampler) and not args.ignore_data_skip:  # the Trainer skips these batches
            sampler.skipped = steps * args.gradient_accumulation_steps * sampler.num_processes

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.trainer.last_step:  # a baseline's stage ends
            control.should_training_stop = control.should_save = True
            control.should_evaluate = control.should_evaluate or args.eval_strategy != "no"
        # Reading the loss waits for the device, except on the CPU, so it is read only if something is logged or saved.
        if self.trainer.model.device.type == "cpu" or control.should_log or control.should_save:
            self.trainer.check_finite()


class TrainingStepCallback(TrainerCallback):
    """
    Callback that calls `model.set_training_step(step)` before each step, for models that anneal a part of their loss.
    The step is that of the trainer's state, so that a resumed run continues where it stopped. [`TranslationTrainer`]
    adds it; `Seq2SeqTrainer` needs `callbacks=[TrainingStepCallback()]`. The `first_step` steps of an earlier stage are
    not counted.
    """

    def __init__(self, first_step: int = 0):
        self.first_step = first_step

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        set_training_step = getattr(kwargs.get("model"), "set_training_step", None)
        if set_training_step is not None:
            set_training_step(state.global_step - self.first_step)


class OutputMeans:
    """
    Means of the `logged_outputs` of a model, themselves means over target words, over several batches. A model's
    `training_warning(means)` may return a warning about them, which is printed once.
    """

    def __init__(self, model: Any):
        self.names = tuple(getattr(model, "logged_outputs", ()))
        self.check: Any = getattr(model, "training_warning", lambda means: None)
        self.has_warned = False
        self.totals: torch.Tensor | None = None  # weighted sums, and the number of words

    def add(self, outputs: Mapping[str, torch.Tensor], labels: torch.Tensor) -> None:
        """Add the output of a batch with labels `(batch_size, target_length)`."""
        count = (labels != -100).sum().float()
        totals = torch.stack([*(outputs[name].detach().float() * count for name in self.names), count])
        self.totals = totals if self.totals is None else self.totals + totals

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means over the batches of all processes since the last call, for logs."""
        if self.totals is None:
            return {}
        *sums, count = accelerator.reduce(self.totals, reduction="sum").tolist()
        self.totals = None
        means = {name: total / max(count, 1.0) for name, total in zip(self.names, sums, strict=True)}
        if not self.has_warned and (warning := self.check(means)):
            self.has_warned = True
            logger.warning(f"Warning: {warning}.")
        return {f"mean_{name}": value for name, value in means.items()}


class MovingAverage(TrainerCallback):
    """
    Callback that keeps the exponential moving average `a <- decay * a + (1 - decay) * w` of a model's weights after
    each update, from those of the first update on (Kingma and Ba, 2015, section 7.2). Evaluations and checkpoints of
    [`~recnmt_hf.TranslationTrainer`] have it.
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

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.average is None:
            self.start()
        else:
            self.update(self.average, self.weights(), None)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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


class Stopwatch(TrainerCallback, ExportableState):
    """
    Callback that measures the duration of training with evaluations, which checkpoints save for resumed runs, and adds
    the estimated time until the last step to printed logs, but not to the history.
    """

    def __init__(self) -> None:
        self.before = 0.0
        self.started: float | None = None
        self.first_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self.started is not None and "loss" in logs and (steps := state.global_step - self.first_step) > 0:
            seconds = (time.monotonic() - self.started) / steps * (state.max_steps - state.global_step)
            logs["time_left"] = str(timedelta(seconds=round(seconds)))

    def state(self) -> dict[str, Any]:
        passed = 0.0 if self.started is None else time.monotonic() - self.started
        return {"args": {}, "attributes": {"before": self.before + passed}}
