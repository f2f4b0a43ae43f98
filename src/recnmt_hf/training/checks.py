"""Checks of a training run before data is read or written."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate.utils import DynamoBackend
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import ParallelMode
from transformers.utils import logging

from .._loading_errors import looks_local
from .._values import check_value, stated
from ..data.files import explained_preparation, partial_folder
from ..data.sharded import load_manifest
from ..data.tokenization import train_tokenizer
from ..errors import MissingFileError, UserError, short_repr
from ..inference.translator import Translator
from .arguments import TranslationTrainingArguments, conflict, rejection, rejections_explained, requirement
from .building import ModelSection, build_config, config_class_of, with_fields_of
from .guided_alignment import check_checkpointing
from .recipe import Recipe
from .testing import validation_options
from .trainer import TranslationTrainer


# Upper bound of the size of existing tokenizers.
MOST_SYMBOLS_OF_TOKENIZERS = 2**18
# Bytes of a parameter in training on the CPU (weight, gradient, Adam's two averages), and of its weight alone.
TRAINING_BYTES, WEIGHT_BYTES = 16, 4


def check_before_training(
    recipe: Recipe, arguments: TranslationTrainingArguments, checkpoint: Path | None = None
) -> None:
    """
    Check everything that does not need data: missing files (a run that resumes from a checkpoint needs no baseline), a
    model that cannot be built or exceeds the memory, settings that a library rejects. Reads no corpus, writes nothing.
    """
    model_section, data = recipe.model, recipe.data
    if model_section.init_from is not None and checkpoint is None:
        check_folder("model.init_from", model_section.init_from, "model", ["config.json", "*.safetensors"])
    for side in ("source", "target"):
        if folder := getattr(recipe.tokenizer, side):
            check_folder(f"tokenizer.{side}", folder, "tokenizer", ["tokenizer_config.json"])
    if data.weights and data.prepared is None:
        remedy = "run recnmt prepare and name its folder, or use data.temperature"
        raise requirement("data.weights", data.weights, "data.prepared", remedy)
    if data.prepared is not None:
        load_manifest(Path(data.prepared))  # raises if there is none
    for place, corpus in recipe.corpora:
        if data.prepared is not None and place.startswith("data.train"):
            continue  # not read
        try:
            corpus.check_languages(data.source_lang, data.target_lang)
            corpus.check_files(data.source_lang, data.target_lang)
        except UserError as error:
            # The field of these errors is a file.
            field = f"{place}: {error.field}" if error.field else place
            raise type(error)(error.message, field=field) from None
    if data.cache_dir:
        folder = Path(data.cache_dir).absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with explained_preparation(data.cache_dir), partial_folder(existing):  # fails unless it is writable
            pass
    recipe.training.scorer.scores(["a"], ["a"])  # raises if a package or file is missing
    model = check_model(recipe, checkpoint)
    check_decoding(recipe)
    if recipe.guides_alignment:
        recipe.guided_alignment.place(model.config)
        check_checkpointing(arguments)
    if recipe.training.baseline_steps is not None:
        check_stages(recipe, arguments, model.config)
    check_libraries(arguments, model)


def check_folder(field: str, folder: str, content: str, patterns: Sequence[str]) -> None:
    """Check that a folder has files with all patterns. Model ids on the Hub pass."""
    for pattern in patterns if looks_local(folder) else ():
        if not list(Path(folder).glob(pattern)):
            raise MissingFileError(
                f"{field}={short_repr(folder)} has no {content} ({pattern} is missing).", field=field
            )


def check_model(recipe: Recipe, checkpoint: Path | None = None) -> PreTrainedModel:
    """
    Check that the model can be built, has positions for the longest training sentences, fits into the memory, without
    allocating it, and supports the numbers of beams. Return the model on the meta device.
    """
    section, tokenizer, data = recipe.model, recipe.tokenizer, recipe.data
    vocabulary: dict[str, Any] = {}
    if not (section.init_from or tokenizer.source):
        vocabulary = {"vocab_size": tokenizer.vocab_size, "share_encoder_decoder_embeddings": tokenizer.joint}
        if not tokenizer.joint:
            vocabulary["decoder_vocab_size"] = tokenizer.target_vocab_size or tokenizer.vocab_size
    if section.init_from is not None:
        section = with_fields_of(checkpoint or section.init_from, section)
    config = build_config(section, **vocabulary)
    if config.sides_with_positions:
        positions = config.max_position_embeddings
        for side in config.sides_with_positions:
            longest = getattr(data, f"max_{side}_length")
            if longest > positions:
                field = f"data.max_{side}_length"
                raise UserError(
                    f"{field}={short_repr(longest)} exceeds the model's {positions} positions.", field=field
                )
        # The table is made in float64 before the weights' dtype is applied.
        check_memory(section, 4 * 8 * positions * config.d_model, "a table of positions")
    model = build_on_meta(config)
    count = model.num_parameters()
    size = count * (TRAINING_BYTES if recipe.training.use_cpu else WEIGHT_BYTES)
    check_memory(section, size, f"{count:,} parameters")
    check_beams: Any = getattr(model, "check_beams", None)
    if check_beams is not None:
        check_beams(recipe.decoding.beams, "decoding.beams")
        check_beams(recipe.training.to_dict().get("bleu_beams", 1), "training.bleu_beams")
    return model


def check_decoding(recipe: Recipe) -> None:
    """
    Check that `decoding.generate` works, for test sets and validation: a tiny model with random weights translates a
    word. `generate` checks most settings only when it uses them, which is after training.
    """
    options, section, model = recipe.decoding, recipe.tokenizer, recipe.model
    if not options.generate:
        return
    is_given = model.init_from or section.source  # a vocabulary of unknown size
    size = MOST_SYMBOLS_OF_TOKENIZERS if is_given else section.vocab_size
    if not section.joint:
        size = max(size, section.target_vocab_size or 0)
    tokenizer = train_tokenizer(["abcdef"], section.target_kind or section.kind, 50)
    config_class = config_class_of(model.type)
    preset = "tiny" if "tiny" in config_class.presets else model.preset
    config = config_class.from_preset(preset, vocab_size=max(size, len(tokenizer)))
    validation = validation_options(stated(options), recipe.training.to_dict().get("bleu_beams", 1))
    with torch.random.fork_rng(devices=[]):
        translator = Translator(AutoModelForSeq2SeqLM.from_config(config).eval(), tokenizer, check=False)
        try:
            for own in (options, validation):
                short = replace(own, max_length_extra=min(options.max_length_extra, 20), max_length_factor=1)
                list(translator.translate(["abcdef"], short, scores=False))
        except Exception as error:  # of any library that computes a setting
            if isinstance(error, UserError) and (error.field or "").startswith("generate"):
                raise error.inside("decoding") from error
            raise rejection("decoding.generate", options.generate, error, "correct it") from error


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device: shapes without memory. The random number generators do not change."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config))
    finally:
        logging.set_verbosity(level)


def check_stages(recipe: Recipe, arguments: TranslationTrainingArguments, config: Any) -> None:
    """Check that a run in two stages has a baseline to begin with."""
    field, steps = "training.baseline_steps", recipe.training.baseline_steps
    if config.baseline() is None:
        raise UserError(
            f"{field}={short_repr(steps)} trains the baseline of a variant, but {describe(recipe.model)} is a plain "
            "model. Set it to null, or model.type to a variant, e.g. biarn_transformer.",
            field=field,
        )
    if arguments.deepspeed:
        remedy = "train the baseline in a run of its own, and set model.init_from"
        raise conflict(field, steps, "training.deepspeed", remedy)


def check_memory(section: ModelSection, size: int, content: str) -> None:
    """Raise `UserError` if the machine has less memory than `size` bytes."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > available:
        raise UserError(
            f"The model {describe(section)} needs {size / 2**30:,.1f} GiB for {content}; {available / 2**30:,.1f} GiB "
            "are available. Use a smaller preset, or lower the largest of model.fields and tokenizer.vocab_size.",
            field="model",
        )


def describe(section: ModelSection) -> str:
    """Describe a model by type, preset and fields."""
    model_fields = "".join(f", {name}={short_repr(value)}" for name, value in list(section.fields.items())[:6])
    return f"{section.type} ({section.preset}{model_fields})"


def check_libraries(arguments: TranslationTrainingArguments, model: PreTrainedModel) -> None:
    """Check optimizer, schedule, reporting and so on, which the Trainer would make only after the data is prepared."""
    if arguments.optimizer is None:  # not Adadelta, which is not an optimizer of transformers
        remedy = "correct it (also optim_args and optim_target_modules, if set), or use adamw_torch"
        with rejections_explained("training.optim", arguments.optim, remedy):
            TranslationTrainer.get_optimizer_cls_and_kwargs(arguments, model)
    steps = max(arguments.max_steps, 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=max(arguments.learning_rate, 1e-9))
    remedy = "correct training.lr_scheduler_kwargs, or use another schedule"
    with rejections_explained("training.lr_scheduler_type", arguments.lr_scheduler_type, remedy):
        get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            num_warmup_steps=arguments.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=cast("dict[str, Any]", arguments.lr_scheduler_kwargs or {}),  # text is parsed
        )
    if arguments.gradient_checkpointing:
        check_gradient_checkpointing(arguments, model)
    for name in arguments.report_to or []:
        with rejections_explained("training.report_to", name, "install it, or set none"):
            for callback in get_reporting_integration_callbacks([name]):
                callback()
    if arguments.fsdp and arguments.parallel_mode != ParallelMode.DISTRIBUTED:
        remedy = "remove it, or start them with accelerate launch"
        raise requirement("training.fsdp", arguments.fsdp, "several processes", remedy)
    if arguments.torch_compile:
        check_compiler(arguments)


def check_gradient_checkpointing(arguments: TranslationTrainingArguments, model: PreTrainedModel) -> None:
    """Check that transformers and torch accept the arguments of gradient checkpointing, by a trial on one number."""
    settings: Any = arguments.gradient_checkpointing_kwargs or {}
    # Older versions of transformers have the other name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    names = inspect.signature(enable).parameters
    of_transformers = {name: value for name, value in settings.items() if name in names}
    of_torch = {name: value for name, value in settings.items() if name not in names}
    remedy = "correct it, e.g. {use_reentrant: false}, or remove it"
    with rejections_explained("training.gradient_checkpointing_kwargs", settings, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if settings.get("offload") and arguments.device.type == "cpu":
            raise ValueError("offload needs an accelerator")
        enable(**of_transformers)
        number = torch.ones(1, requires_grad=True)
        checkpoint(torch.nn.Tanh(), number, **{"use_reentrant": True, **of_torch}).backward()


def check_compiler(arguments: TranslationTrainingArguments) -> None:
    """Check that the compiler's backend and mode exist."""
    import torch._dynamo
    import torch._inductor

    known = set(torch._dynamo.list_backends(None)) & {backend.value.lower() for backend in DynamoBackend}
    choices = {"torch_compile_backend": sorted(known)}
    if arguments.torch_compile_backend == "inductor":
        choices["torch_compile_mode"] = list(torch._inductor.list_mode_options())
    for name, values in choices.items():
        value = getattr(arguments, name)
        if value is not None:
            check_value(f"training.{name}", value, Literal[tuple(values)])
