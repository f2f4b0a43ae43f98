"""Checks of a training run before anything is read, tokenized or written."""

from __future__ import annotations

import copy
import inspect
import os
import tempfile
import warnings
from collections.abc import Mapping
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
from .._values import check_value, shown
from ..data.files import PREFIX
from ..data.tokenization import train_tokenizer
from ..inference.translator import Translator
from ..metrics.rouge import RougeF1
from ..models import kernels_shared
from ..models.user_errors import MissingFileError, UserError
from .arguments import TranslationTrainingArguments
from .building import ModelSection, build_config, config_class_of
from .recipe import Recipe
from .trainer import TranslationTrainer


MOST_PARAMETERS = 10**11
# More than tokenizers of trained models have.
MOST_SYMBOLS_OF_TOKENIZERS = 2**18
# Of a parameter while it is trained on the CPU: weight, gradient and Adam's two averages in float32.
TRAINING_BYTES, WEIGHT_BYTES = 16, 4


def check_before_training(
    recipe: Recipe, arguments: TranslationTrainingArguments, from_checkpoint: bool = False
) -> None:
    """
    Check everything that can be checked before data is read: missing files, a model that cannot be built or exceeds the
    memory, settings that a library rejects. Reads no corpus and writes nothing.

    Args:
        recipe ([`Recipe`]): The recipe.
        arguments ([`TranslationTrainingArguments`]): The Trainer's arguments of the recipe.
        from_checkpoint (`bool`, *optional*, defaults to `False`): Whether the run resumes from a checkpoint, so that it
            no longer needs a baseline to start from.

    Raises:
        UserError: A check failed; the message names the field, and the remedy.
    """
    model_section, data = recipe.model, recipe.data
    if model_section.init_from is not None and not from_checkpoint:
        needed = {"config.json": "config.json", "*.safetensors": "weights (*.safetensors)"}
        remedy = "train the baseline first, or name its folder"
        check_folder(f"model.init_from={model_section.init_from}", needed, "model", remedy)
    for side in ("source", "target"):
        if folder := getattr(recipe.tokenizer, side):
            needed = {"tokenizer_config.json": "tokenizer_config.json"}
            remedy = "name a folder written by training or `recnmt tokenizer`, or leave it out to train one"
            check_folder(f"tokenizer.{side}={folder}", needed, "tokenizer", remedy)
    for place, corpus in recipe.corpora:
        try:
            corpus.check_languages(data.source_lang, data.target_lang)
            corpus.check_files()
        except FileNotFoundError as error:
            raise MissingFileError(f"{place}: {error}") from None
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    kernels_shared.setting()  # raises for a wrong value
    if recipe.training.text_metric == "rouge":
        RougeF1("rouge1")  # raises where the package is not installed
    model = check_model(recipe)
    check_decoding(recipe)
    if recipe.training.baseline_steps is not None:
        check_stages(recipe, arguments, model.config)
    check_optimizer(arguments, model)
    check_schedule(arguments)
    if arguments.gradient_checkpointing:
        check_checkpointing(arguments, model)
    check_machinery(arguments)
    if data.cache_dir:
        check_cache(Path(data.cache_dir))


def check_folder(place: str, needed: Mapping[str, str], content: str, remedy: str) -> None:
    """
    Check that the folder of `place` (`"section.field=folder"`) has files with the patterns `needed`, which maps them to
    their names in messages. Model ids on the Hub pass.
    """
    folder = place.partition("=")[2]
    for pattern, name in needed.items() if looks_local(folder) else ():
        if not list(Path(folder).glob(pattern)):
            raise MissingFileError(f"{place} holds no {content} ({name} missing). Remedy: {remedy}.")


def check_cache(folder: Path) -> None:
    """Check that prepared data can be written to a folder."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    why = None if nearest.is_dir() else "is no folder"
    if why is None:
        try:
            with tempfile.TemporaryDirectory(prefix=PREFIX, dir=nearest):  # which /proc refuses even to root
                pass
        except OSError as error:
            why = f"cannot be written to ({error.strerror})"
    if why is not None:
        raise UserError(f"data.cache_dir={folder}: {nearest} {why}. Remedy: choose another, or leave it out.")


def check_model(recipe: Recipe) -> PreTrainedModel:
    """
    Check that the model can be built, has positions for the longest training sentences, and fits the memory, without
    allocating it.

    Returns:
        The model on the meta device.

    Raises:
        UserError: The model does not meet a condition.
    """
    section, tokenizer, data = recipe.model, recipe.tokenizer, recipe.data
    vocabulary: dict[str, Any] = {}
    if not (section.init_from or tokenizer.source):
        vocabulary = {"vocab_size": tokenizer.vocab_size, "share_encoder_decoder_embeddings": tokenizer.joint}
        if not tokenizer.joint:
            vocabulary["decoder_vocab_size"] = tokenizer.target_vocab_size or tokenizer.vocab_size
    config = build_config(section, **vocabulary)
    if config.sides_with_positions:
        for side in config.sides_with_positions:
            longest = getattr(data, f"max_{side}_length")
            if longest > config.max_position_embeddings:
                raise UserError(
                    f"data.max_{side}_length={longest} is more than the model's positions "
                    f"(max_position_embeddings={config.max_position_embeddings}). Remedy: lower the one, or raise "
                    "model.fields.max_position_embeddings."
                )
        # The table is made in float64 before the weights' dtype is applied.
        size = 4 * 8 * config.max_position_embeddings * config.d_model
        refuse_beyond_memory(section, size, "a table of positions")
    model = without_memory(config)
    count = model.num_parameters()
    if count > MOST_PARAMETERS:
        raise UserError(f"{described(section)} has {count:,} parameters. Remedy: lower the largest of model.fields.")
    size = count * (TRAINING_BYTES if recipe.training.use_cpu else WEIGHT_BYTES)
    refuse_beyond_memory(section, size, f"{count:,} parameters")
    return model


def check_decoding(recipe: Recipe) -> None:
    """
    Check that `decoding.generate` works: a tiny model with random weights translates a word. `generate` checks most of
    its settings only when it uses them, which a run does after training.

    Raises:
        UserError: `generate` rejects a setting.
    """
    options, section, model = recipe.decoding, recipe.tokenizer, recipe.model
    if not options.generate:
        return
    is_given = model.init_from or section.source  # a vocabulary whose size is unknown
    size = MOST_SYMBOLS_OF_TOKENIZERS if is_given else section.vocab_size
    if not section.joint:
        size = max(size, section.target_vocab_size or 0)
    tokenizer = train_tokenizer(["abcdef"], section.target_kind or section.kind, 50)
    config_class = config_class_of(model.type)
    preset = "tiny" if "tiny" in config_class.presets else model.preset
    config = config_class.from_preset(preset, vocab_size=max(size, len(tokenizer)))
    with torch.random.fork_rng(devices=[]):
        translator = Translator(AutoModelForSeq2SeqLM.from_config(config).eval(), tokenizer, check=False)
        short = replace(options, max_length_extra=min(options.max_length_extra, 20), max_length_factor=1)
        try:
            list(translator.translate(["abcdef"], short, scores=False))
        except Exception as error:  # of any library that computes a setting
            message = str(error)
            if not message.startswith("generate="):
                message = f"generate={shown(options.generate)} fails ({first_line(error)}). Remedy: correct it."
            raise UserError(f"decoding.{message}") from error


def without_memory(config: PreTrainedConfig) -> PreTrainedModel:
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
    if config.baseline() is None:
        raise UserError(
            f"training.baseline_steps={recipe.training.baseline_steps} trains the plain model that a variant starts "
            f"from, and {described(recipe.model)} is a plain one itself. Remedy: set it to null, or choose a variant "
            "in model.type, e.g. biarn_transformer."
        )
    if arguments.deepspeed:
        raise UserError(
            "training.baseline_steps does not go together with training.deepspeed. Remedy: train the baseline in a run "
            "of its own, and name it in model.init_from."
        )


def check_planned_steps(baseline_steps: int, steps: int) -> None:
    """Raise `UserError` if a baseline's stage leaves no step to the variant."""
    if baseline_steps >= steps:
        raise UserError(
            f"training.baseline_steps={baseline_steps} leaves no step for the variant: both stages together have "
            f"{steps}. Remedy: lower it, or raise training.max_steps."
        )


def refuse_beyond_memory(section: ModelSection, size: int, content: str) -> None:
    """Raise `UserError` if the machine has less memory than `size` bytes."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > available:
        raise UserError(
            f"{described(section)} needs {size / 2**30:,.1f} GiB for {content}, and this machine has "
            f"{available / 2**30:,.1f}. Remedy: use a smaller preset, or lower the largest of model.fields and "
            "tokenizer.vocab_size."
        )


def described(section: ModelSection) -> str:
    model_fields = "".join(f", {name}={shown(value)}" for name, value in list(section.fields.items())[:6])
    return f"model: {section.type} ({section.preset}{model_fields})"


def check_optimizer(arguments: TranslationTrainingArguments, model: PreTrainedModel) -> None:
    """Check that the optimizer is installed and accepts its arguments."""
    if arguments.optimizer is not None:  # Adadelta, which is none of transformers' optimizers
        return
    try:
        TranslationTrainer.get_optimizer_cls_and_kwargs(arguments, model)
    except (ImportError, ValueError, KeyError, TypeError) as error:
        given = "".join(
            f", training.{name}={shown(value)}"
            for name in ("optim_args", "optim_target_modules")
            if (value := getattr(arguments, name)) is not None
        )
        raise UserError(
            f"training.optim={shown(arguments.optim)}{given} cannot be used ({first_line(error).rstrip('.')}). Remedy: "
            "correct it, or use adamw_torch."
        ) from error


def check_schedule(arguments: TranslationTrainingArguments) -> None:
    """Check that the schedule of the learning rate can be made."""
    name, steps = arguments.lr_scheduler_type, max(arguments.max_steps, 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=max(arguments.learning_rate, 1e-9))
    try:
        get_scheduler(
            name,
            optimizer,
            num_warmup_steps=arguments.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=cast("dict[str, Any]", arguments.lr_scheduler_kwargs or {}),  # text is parsed
        )
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"training.lr_scheduler_type={shown(name)} cannot be used ({first_line(error)}). Remedy: correct "
            "training.lr_scheduler_kwargs, or use another."
        ) from error


def check_machinery(arguments: TranslationTrainingArguments) -> None:
    """Check what reports, compiles and shards; the Trainer would do so only after the data is prepared."""
    for name in arguments.report_to or []:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (ImportError, RuntimeError, ValueError) as error:
            raise UserError(
                f"training.report_to={shown(name)} cannot be used ({first_line(error).rstrip('.')}). Remedy: install "
                "it, or write none."
            ) from error
    if arguments.fsdp and arguments.parallel_mode != ParallelMode.DISTRIBUTED:
        raise UserError(
            "training.fsdp needs several processes, and this is one. Remedy: leave it out, or start them with "
            "accelerate launch."
        )
    if arguments.torch_compile:
        check_compiler(arguments)


def check_checkpointing(arguments: TranslationTrainingArguments, model: PreTrainedModel) -> None:
    """Check that transformers and torch accept the arguments of gradient checkpointing, by a trial on one number."""
    given: Any = arguments.gradient_checkpointing_kwargs or {}
    # Older versions of transformers have the other name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    names = inspect.signature(enable).parameters
    one = torch.ones(1, requires_grad=True)
    try:
        if given.get("offload") and arguments.device.type == "cpu":
            raise ValueError("offload needs an accelerator")
        enable(**{name: value for name, value in given.items() if name in names})
        of_torch = {name: value for name, value in given.items() if name not in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint(torch.nn.Tanh(), one, **{"use_reentrant": True, **of_torch}).backward()
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise UserError(
            f"training.gradient_checkpointing_kwargs={shown(given)} is not allowed ({first_line(error).rstrip('.')}). "
            "Remedy: correct it, e.g. {use_reentrant: false}, or leave it out."
        ) from error


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


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
