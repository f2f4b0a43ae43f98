"""The dry run of a plan on the meta device: finds settings that are wrong before data is read or written."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import ParallelMode
from transformers.utils import logging

from ..data.sharded import load_manifest
from ..errors import UserError
from .building import build_config
from .guided_alignment import check_checkpointing
from .plan import Plan


# Bytes of a parameter in training on the CPU (weight, gradient, Adam's two averages), and of its weight alone.
TRAINING_BYTES, WEIGHT_BYTES = 16, 4


def dry_run(plan: Plan) -> None:
    """Build model, optimizer and schedule of a plan without memory, and look for its files. Writes nothing."""
    check_files(plan)
    plan.arguments.scorer.scores(["a"], ["a"])  # raises if a package or file is missing
    model, arguments = model_on_meta(plan), plan.arguments
    if plan.guided_alignment is not None:
        plan.guided_alignment.place(model.config)
        check_checkpointing(arguments)
    if len(plan.stages) > 1 and (model.config.baseline() is None or arguments.deepspeed):
        field = "training.baseline_steps"
        raise UserError(f"{field} needs a variant, without DeepSpeed; the model is {plan.data.model}.", field=field)
    if arguments.fsdp and arguments.parallel_mode != ParallelMode.DISTRIBUTED:
        raise UserError("training.fsdp needs several processes: use accelerate launch.", field="training.fsdp")
    steps = max(arguments.max_steps, 1)
    try:
        if arguments.optimizer is None:  # else Adadelta, which is not one of transformers
            Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        get_scheduler(
            arguments.lr_scheduler_type,
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=max(arguments.learning_rate, 1e-9)),
            num_warmup_steps=arguments.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=cast("dict[str, Any]", arguments.lr_scheduler_kwargs or {}),
        )
        if arguments.gradient_checkpointing:
            # Older versions of transformers have the other name.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(arguments.gradient_checkpointing_kwargs)
        for callback in get_reporting_integration_callbacks(arguments.report_to or []):
            callback()
    except Exception as error:  # of any library that computes a setting
        raise UserError(f"training: {error}", field="training") from error


def check_files(plan: Plan) -> None:
    """Raise an error if a corpus of a plan is missing, so that a test set is not missed after training."""
    data = plan.data
    if data.mixture.weights and data.prepared is None:
        raise UserError("data.weights requires data.prepared, or use data.temperature.", field="data.weights")
    if data.prepared is not None:
        load_manifest(Path(data.prepared))  # raises if there is none
    for place, corpus in data.places:
        if data.prepared is None or not place.startswith("data.train"):
            corpus.check_languages(data.source_lang, data.target_lang)
            corpus.check_files(data.source_lang, data.target_lang)


def model_on_meta(plan: Plan) -> PreTrainedModel:
    """Build the last stage's model on the meta device, and check its positions, memory and beams."""
    vocabulary = {}
    if not (plan.data.model.init_from or plan.data.tokenizers):
        sizes = [vocabulary["vocab_size"] for vocabulary in plan.data.vocabularies]
        vocabulary = {"vocab_size": sizes[0], "share_encoder_decoder_embeddings": len(sizes) == 1}
        if len(sizes) > 1:
            vocabulary["decoder_vocab_size"] = sizes[1]
    config = build_config(plan.data.model, **vocabulary)
    # The table of positions is made in float64 before the weights' dtype is applied.
    needed = 4 * 8 * config.max_position_embeddings * config.d_model if config.sides_with_positions else 0
    for side in config.sides_with_positions:
        field, longest = f"data.max_{side}_length", plan.data.lengths[f"max_{side}_length"]
        if longest > config.max_position_embeddings:
            raise UserError(
                f"{field}={longest} exceeds the model's {config.max_position_embeddings} positions.", field=field
            )
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= available:
        model = build_on_meta(config)
        needed = max(needed, model.num_parameters() * (TRAINING_BYTES if plan.arguments.use_cpu else WEIGHT_BYTES))
    if needed > available:
        raise UserError(
            f"The model {plan.data.model} needs {needed / 2**30:,.1f} GiB; {available / 2**30:,.1f} GiB are available.",
            field="model",
        )
    check_beams: Any = getattr(model, "check_beams", None)
    if check_beams is not None:
        check_beams(plan.decoding.beams, "decoding.beams")
        check_beams(plan.arguments.bleu_beams, "training.bleu_beams")
    return model


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device: shapes without memory. The random number generators do not change."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config))
    finally:
        logging.set_verbosity(level)
