"""`Seq2SeqTrainer` with batches by tokens, chunked loss, BLEU by generation, and complete checkpoints."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import recursively_apply
from datasets import Dataset
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from ..data.batching import BatchLimits, TokenBatchSampler
from ..data.sharded import PooledBatchSampler, ShardedDataset
from ..data.tokenization import ResegmentedDataset, Resegmenter
from ..data.tokenizer_pair import TokenizerPair
from ..data.tree_inputs import TREE_INPUTS, Relations, tree_options
from ..errors import UserError
from ..models.seq2seq_loading import read_safetensors
from . import checkpoints
from .arguments import TranslationTrainingArguments
from .callbacks import MovingAverage, RunCallback, Stopwatch, TrainingStepCallback, collator_of
from .guided_alignment import AlignmentGuide, GuidedAlignment, Means
from .metrics import BY_METRIC
from .processes import logger
from .testing import evaluate, validation_options


class NonFiniteLossError(UserError):
    """The loss became NaN or infinite. Nothing was saved since."""


class TranslationTrainer(Seq2SeqTrainer):
    """
    Trainer of translation models: `Seq2SeqTrainer` on datasets of [`~recnmt_hf.data.prepare_dataset`]. For BLEU,
    `eval_dataset` needs its text (`keep_text=True`).

    Args:
        model (`torch.nn.Module`): An encoder-decoder of this package or of transformers.
        args ([`TranslationTrainingArguments`]): Arguments of training.
        tokenizer (`PreTrainedTokenizerBase`): Source tokenizer, and target tokenizer unless that is given.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Target tokenizer.
        relations ([`~recnmt_hf.data.Relations`], *optional*): Of a model that reads dependency trees.
        last_step (`int`, *optional*): Last step of the first of two stages, whose learning rates are the whole run's.
        baseline (`str` or `Path`, *optional*): For the second stage: the last checkpoint of the first, which
            initializes `model`. `train(resume_from_checkpoint=baseline)` continues its steps, learning rate, position
            in the data and random numbers, but not weights and optimizer. The learning rate rises to its schedule
            again, over the steps of the warm-up, at most `2 / (1 - adam_beta2)` (Ma and Yarats, 2021).
        validation_decoding (mapping, *optional*): Fields of [`~recnmt_hf.inference.DecodingOptions`] for text that BLEU
            or ROUGE evaluates, with `args.bleu_beams` beams. Long sources are split unless they are truncated.
        bpe_dropout (`float`, *optional*, defaults to 0.0): Probability of leaving out a merge of a word in training.
        guided_alignment ([`~recnmt_hf.training.guided_alignment.GuidedAlignment`], *optional*): Train a head of the
            cross-attention on the links of `train_dataset`. The log has their unweighted loss per linked target token
            as `alignment_loss`; `loss` includes it with its weight.
        **kwargs: As for `Seq2SeqTrainer`.

    Raises:
        UserError: Settings contradict each other.
    """

    args: TranslationTrainingArguments
    model: PreTrainedModel
    model_wrapped: torch.nn.Module
    train_dataset: Dataset | ShardedDataset
    eval_dataset: Dataset

    def __init__(
        self,
        model: torch.nn.Module,
        args: TranslationTrainingArguments,
        *,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        relations: Relations | None = None,
        last_step: int | None = None,
        baseline: str | Path | None = None,
        validation_decoding: Mapping[str, Any] | None = None,
        bpe_dropout: float = 0.0,
        guided_alignment: GuidedAlignment | None = None,
        **kwargs: Any,
    ):
        self.last_step, self.bpe_dropout = last_step, bpe_dropout
        self.baseline = None if baseline is None else Path(baseline)
        self.first_step = 0 if self.baseline is None else checkpoints.steps_of(self.baseline)
        self.steps_before = 0  # of an earlier process
        self.validation_options = validation_options(validation_decoding or {}, args.bleu_beams)
        args.remove_unused_columns = False
        args.save_total_limit = None  # `keep_last` and `keep_best` decide
        config = getattr(model, "config", None)
        self.smooths_itself = bool(getattr(model, "computes_smoothed_loss", False))
        if self.smooths_itself:
            # The Trainer writes this into the configuration. With labels these models use no cache anyway, and
            # generation with the trained model needs one.
            args.use_cache = cast("PreTrainedModel", model).config.use_cache
        self.tokenizers = TokenizerPair(tokenizer, target_tokenizer, relations)
        self.tokenizers.check_padding(getattr(config, "pad_token_id", None))
        self.data_seed = args.seed if args.data_seed is None else args.data_seed
        self.reads_trees = tree_options(config) is not None
        # transformers' own models need the decoder's input where the Trainer smooths labels.
        kwargs.setdefault("data_collator", collator_of(self.tokenizers, model))
        super().__init__(model=model, args=args, processing_class=tokenizer, **kwargs)
        if args.optimizer == "adadelta" and self.optimizer is None:
            # An argument of Trainer that Seq2SeqTrainer does not take. transformers has no Adadelta (Zeiler, 2012).
            settings = {"lr": args.learning_rate, "rho": args.adadelta_rho, "eps": args.adadelta_eps}
            self.optimizer_cls_and_kwargs = torch.optim.Adadelta, settings
        if self.smooths_itself:
            self.label_smoother = None
        else:
            # transformers' own encoder-decoders take loss keywords and ignore them, which breaks accumulation.
            self.model_accepts_loss_kwargs = False
        self.alignment_guide: AlignmentGuide | None = None
        if guided_alignment is not None:
            settings = cast("dict[str, Any]", args.gradient_checkpointing_kwargs or {})
            if args.gradient_checkpointing and settings.get("use_reentrant"):
                field = "training.gradient_checkpointing_kwargs"  # it lets no gradient into attention weights
                raise UserError(f"{field}: guided_alignment requires use_reentrant: false.", field=field)
            self.alignment_guide = AlignmentGuide(self.model, guided_alignment)
        self.train_sampler: Any = None
        self.resegmented: ResegmentedDataset | None = None  # the training data, with BPE dropout
        self.loss_is_finite: torch.Tensor | None = None
        self.output_means = Means(getattr(model, "logged_outputs", ()))  # which are means over target words
        self.has_warned = False
        if args.ema_decay is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise UserError("ema_decay is not supported with FSDP and DeepSpeed.", field="ema_decay")
        self.moving_average = MovingAverage(self.model, args.ema_decay)
        for callback in (self.moving_average, Stopwatch(), TrainingStepCallback(self.first_step), RunCallback(self)):
            self.add_callback(callback)

    def token_sampler(self, dataset: Dataset | ShardedDataset, shuffle: bool) -> Any:
        """Return the sampler of a prepared dataset: one of those in `data.batching` and `data.sharded`."""
        squared = self.args.max_squared_tokens
        if squared is None and getattr(self.model.config, "compares_all_pairs", False):
            squared = 64 * self.args.max_tokens  # 64 pairs of words for a token of the batch
        limits = BatchLimits(self.args.max_tokens, self.args.max_sentences, squared or None)
        processes = self.accelerator.num_processes if shuffle else 1
        settings: dict[str, Any] = {"num_processes": processes, "seed": self.data_seed, "shuffle": shuffle}
        if isinstance(dataset, ShardedDataset):
            return PooledBatchSampler(dataset, limits, **settings)
        source, target = (dataset[f"{side}_length"][:] for side in ("source", "target"))
        return TokenBatchSampler(source, target, **settings, **vars(limits))

    def loader(self, dataset: Dataset | ShardedDataset, sampler: Any, training: bool = False) -> DataLoader[Any]:
        """Return the loader of a prepared dataset; only that for `training` has links and BPE dropout."""
        names = ["input_ids", "labels"]
        if training and self.alignment_guide is not None and "links" in dataset.column_names:
            names.append("links")
        if self.reads_trees:
            names += [name for name in TREE_INPUTS if name in dataset.column_names]
        columns: Any = dataset.select_columns(names)
        if isinstance(columns, Dataset):
            columns = columns.with_format(None)  # lists are collated fastest
        if training and self.bpe_dropout > 0:
            source, target = self.tokenizers
            resegmenters = Resegmenter(source, self.bpe_dropout), Resegmenter(target, self.bpe_dropout)
            longest = getattr(self.model.config, "max_position_embeddings", None)
            columns = self.resegmented = ResegmentedDataset(columns, resegmenters, seed=self.data_seed, longest=longest)
            columns.check()
        return DataLoader(
            columns,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            persistent_workers=self.args.dataloader_persistent_workers,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        self.train_sampler = self.token_sampler(self.train_dataset, shuffle=True)
        # The sampler gives all processes equally many batches. accelerate before 1.14 could not fill up a last round,
        # because these batches have no fixed size.
        self.accelerator.even_batches = False
        loader = self.accelerator.prepare(self.loader(self.train_dataset, self.train_sampler, training=True))
        self.accelerator.even_batches = True
        return loader

    def updates_of(self, sampler: Any) -> int:
        """Return the number of steps of an epoch."""
        return math.ceil(len(sampler) // sampler.num_processes / self.args.gradient_accumulation_steps)

    def planned_steps(self) -> int:
        """Return the number of steps of the whole training."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        updates = self.updates_of(self.token_sampler(self.train_dataset, shuffle=True))
        return math.ceil(self.args.num_train_epochs * updates)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        is_new = self.lr_scheduler is None
        if self.args.lr_scheduler_type in BY_METRIC:
            mode, given = "max" if self.args.greater_is_better else "min", self.args.lr_scheduler_kwargs
            self.args.lr_scheduler_kwargs = {"mode": mode, **cast("dict[str, Any]", given or {})}
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        for group in scheduler.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # other schedulers than torch's own need it to be resumed
        warmup = round(min(self.args.get_warmup_steps(num_training_steps), 2 / (1 - self.args.adam_beta2)))
        if is_new and self.baseline is not None and warmup > 0 and isinstance(scheduler, LambdaLR):
            schedules = scheduler.lr_lambdas
            scheduler.lr_lambdas = [partial(warmed_up, schedule, self.first_step, warmup) for schedule in schedules]
        return scheduler

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any) -> Any:
        if self.smooths_itself and not return_outputs:
            smoothing = self.args.label_smoothing_factor if model.training else 0.0
            inputs = {**inputs, "smoothing": smoothing, "return_logits": False}
            if self.output_means.totals and model.training:
                loss, outputs = super().compute_loss(model, inputs, True, *args, **kwargs)
                count = (inputs["labels"] != -100).sum().float()
                for name in self.output_means.totals:
                    self.output_means.add(name, outputs[name].detach().float() * count, count)
                return loss
        return super().compute_loss(model, inputs, return_outputs, *args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as the Trainer, but `resume_from_checkpoint=True` selects the newest intact checkpoint."""
        if resume_from_checkpoint is True:
            newest = checkpoints.newest_intact_checkpoint(self.args.folder)
            if newest is None:
                raise UserError(f"{self.args.folder} has no complete checkpoint.", field=self.args.folder)
            resume_from_checkpoint = str(newest)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        finite = torch.isfinite(loss.detach()).all()
        self.loss_is_finite = finite if self.loss_is_finite is None else self.loss_is_finite & finite
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer, with the means of the model's `logged_outputs` and of the alignment loss."""
        if "loss" in logs:
            means, check = self.output_means.take(self.accelerator), getattr(self.model, "training_warning", None)
            if means and check is not None and not self.has_warned and (warning := check(means)):
                self.has_warned = True
                logger.warning(f"Warning: {warning}.")
            logs |= {f"mean_{name}": value for name, value in means.items()}
            if self.alignment_guide is not None:
                logs |= self.alignment_guide.means.take(self.accelerator)
        super().log(logs, *args, **kwargs)

    def check_finite(self, with_weights: bool = False) -> None:
        """Raise `NonFiniteLossError` if the loss of any process, or with `with_weights` a parameter, is not finite."""
        flags = [] if self.loss_is_finite is None else [self.loss_is_finite]
        if with_weights:  # every process checks its own part of sharded parameters
            weights = map(torch.Tensor.detach, self.model.parameters())
            own = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
            flags += [torch.isfinite(part).all() for part in own]
        if not flags:
            return
        bad = self.accelerator.reduce((~torch.stack(flags)).any().float(), reduction="sum")
        if bad.item() > 0:
            newest = checkpoints.newest_checkpoint(self.args.folder) or "(none)"
            reason = f"The loss became NaN or infinite by step {self.state.global_step}."
            remedy = f"Newest good checkpoint: {newest}. Resume with a lower learning_rate, a longer warm-up, or"
            raise NonFiniteLossError(f"{reason} {remedy} max_grad_norm: 1.0.")

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self.use_trained_weights()
        with self.moving_average.applied():
            if description == "Evaluation" and not self.args.predict_with_generate and self.compute_metrics is None:
                dataset, prefix = self.evaluated_dataset, kwargs.get("metric_key_prefix", "eval")
                metrics = {f"{prefix}_{name}": value for name, value in evaluate(self, dataset).items()}
                predictions: Any = None  # as in transformers' own loop, against its type
                return EvalLoopOutput(predictions, label_ids=None, metrics=metrics, num_samples=len(dataset))
            self.gather_function = lambda values: values  # every process reads all batches
            output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        if description != "Prediction" or not self.args.eval_do_concat_batches:
            return output
        order = np.argsort(np.concatenate(list(dataloader.batch_sampler)))  # batches have sentences of similar lengths
        predictions, labels = recursively_apply(
            lambda values: values[order] if len(values) == len(order) else values,  # else one value for each batch
            (output.predictions, output.label_ids),
            test_type=lambda value: isinstance(value, np.ndarray),
        )
        return output._replace(predictions=predictions, label_ids=labels)

    def use_trained_weights(self) -> None:
        """Switch a schedule-free optimizer to the weights that are evaluated and saved, until the next step."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader[Any]:
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        self.evaluated_dataset = dataset
        return self.loader(dataset, self.token_sampler(dataset, shuffle=False))

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader[Any]:
        return self.get_eval_dataloader(test_dataset)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with self.moving_average.applied():
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self.args.folder)
            self.tokenizers.save_beside_source(folder)  # the Trainer saves the source's
            if folder != self.args.folder:
                self.moving_average.save_trained(folder)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.use_trained_weights()
        self.check_finite(with_weights=True)
        folder = self.args.folder / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            checkpoints.discard(folder)  # incomplete or damaged
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.mark_complete(folder)
            checkpoints.rotate_checkpoints(self.args)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self.baseline == Path(resume_from_checkpoint):
            return  # the model has its parameters
        if getattr(self.accelerator, "is_fsdp2", False):
            # accelerate's own loading fails for embeddings that source and target share.
            weights: dict[str, Any] = read_safetensors(resume_from_checkpoint) if self.is_world_process_zero() else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            set_model_state_dict(self.model_wrapped if model is None else model, weights, options=options)
            return
        # transformers writes weights on the first host alone, and DDP gives those of the first process to all.
        if self.is_world_process_zero() or self.is_fsdp_enabled or not self.args.save_on_each_node:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.moving_average.resume(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer and scheduler as the Trainer does, but keep the learning rate of the new run."""
        if checkpoint is not None and self.baseline == Path(checkpoint):
            if isinstance(self.lr_scheduler, LambdaLR):
                state = {"last_epoch": self.first_step - 1, "_step_count": self.first_step + 1}
                self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **state})
                self.lr_scheduler.step()
            return
        if checkpoint is None or self.is_deepspeed_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        assert self.optimizer is not None and self.lr_scheduler is not None
        new_rates = [group.get("initial_lr") for group in self.optimizer.param_groups]
        new_bases = list(getattr(self.lr_scheduler, "base_lrs", []))
        super()._load_optimizer_and_scheduler(checkpoint)
        for group, new in zip(self.optimizer.param_groups, new_rates, strict=True):
            old = group.setdefault("initial_lr", new)  # earlier versions did not save that of BY_METRIC
            if old != new:
                group["lr"] = group["lr"] * new / old if old else new
                group["initial_lr"] = new
        if new_bases:
            self.lr_scheduler.base_lrs = new_bases
            self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _load_callback_state(self) -> None:
        """Load the states of callbacks, but keep the new patience. Callbacks without one get a state of their own."""
        callbacks = self.callback_handler.callbacks
        patience = [each.early_stopping_patience for each in callbacks if isinstance(each, EarlyStoppingCallback)]
        super()._load_callback_state()
        states: Any = self.state.stateful_callbacks
        for callback in self.callback_handler.callbacks:  # new objects
            if isinstance(callback, EarlyStoppingCallback):
                callback.early_stopping_patience = patience[0]
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, callback.state())


def warmed_up(schedule: Callable[[int], float], first_step: int, warmup: int, step: int) -> float:
    """Return a schedule's factor of the learning rate, reduced at the steps after a new optimizer's first update."""
    return schedule(step) * min(1.0, max(step - first_step + 1, 0) / warmup)
