"""Parts of the trainer: batches as tensors, stages, annealing, means of outputs, moving average of weights, time."""

import copy
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from ..data.alignments import collate_links
from ..data.batching import TokenBatchSampler
from ..data.languages import language_ids
from ..data.tokenizer_pair import TokenizerPair
from ..data.tree_inputs import TreeCollator


# File of a checkpoint with the weights that training continues from; its model.safetensors has the moving average.
TRAINED = "trained_weights.pt"


class TranslationCollator(TreeCollator):
    """A collator that also makes the tensor of `links`, and the decoder's input of models that do not make it."""

    # Labels that end in one of these tokens (of mBART, and of NLLB formerly) begin with it instead, as translations do.
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
    collator = TranslationCollator(tokenizer, None if getattr(model, "computes_smoothed_loss", False) else model)
    languages = language_ids(target).values()
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    if start is not None and start not in languages:  # else the decoder begins with the last token of the labels
        collator.languages = frozenset(languages)
    return collator


class RunCallback(TrainerCallback):
    """Callback of a trainer for token samplers, resumed runs, stages, and losses that are not finite."""

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
    Callback that calls `model.set_training_step(step)` before each step, for models that anneal a part of their loss;
    resumed runs continue. [`TranslationTrainer`] adds it; `Seq2SeqTrainer` needs `callbacks=[TrainingStepCallback()]`.
    The `first_step` steps of an earlier stage are not counted.
    """

    def __init__(self, first_step: int = 0):
        self.first_step = first_step

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        set_training_step = getattr(kwargs.get("model"), "set_training_step", None)
        if set_training_step is not None:
            set_training_step(state.global_step - self.first_step)


class MovingAverage(TrainerCallback):
    """Callback that averages weights, `a <- decay * a + (1 - decay) * w` (Kingma and Ba, 2015, section 7.2)."""

    def __init__(self, model: torch.nn.Module, decay: float | None):
        self.model = model
        self.update = None if decay is None else get_ema_multi_avg_fn(decay)
        # Not torch's AveragedModel, which copies the model with its hooks, and what these refer to.
        self.average: list[torch.Tensor] | None = None

    def present_weights(self) -> list[torch.Tensor]:
        """Return a copy of the model's weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.update is not None and self.average is None:
            self.average = self.present_weights()
        elif self.update is not None:
            self.update(self.average, [parameter.detach() for parameter in self.model.parameters()], None)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.average = None  # the Trainer gave the model an earlier average

    def assign(self, values: Iterable[torch.Tensor]) -> None:
        """Give the model these weights."""
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.detach().copy_(value)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average's weights, if there is one, in a context."""
        if self.average is None:
            yield
            return
        trained = self.present_weights()
        try:
            self.assign(self.average)
            yield
        finally:
            self.assign(trained)

    def save_trained(self, folder: Path) -> None:
        """Write the weights that are trained into a checkpoint, if its model is the average."""
        if self.update is not None:
            torch.save({name: value.detach() for name, value in self.model.named_parameters()}, folder / TRAINED)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint whose average, if there is one, the model has already."""
        if self.update is not None:
            self.average = self.present_weights()
            trained = torch.load(folder / TRAINED, map_location="cpu", weights_only=True)
            self.assign(trained[name] for name, _ in self.model.named_parameters())


class Stopwatch(TrainerCallback, ExportableState):
    """Callback that measures the duration of training with evaluations, which checkpoints save for resumed runs."""

    def __init__(self) -> None:
        self.before = 0.0
        self.started: float | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def state(self) -> dict[str, Any]:
        passed = 0.0 if self.started is None else time.monotonic() - self.started
        return {"args": {}, "attributes": {"before": self.before + passed}}
