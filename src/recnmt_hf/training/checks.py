"""What can be known of a training run before anything is read, tokenized or written."""

from __future__ import annotations

import difflib
import inspect
import os
import tempfile
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DynamoBackend
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import ParallelMode
from transformers.utils import logging

from .._loading_errors import looks_local
from .._values import shown
from ..data.corpora import Corpus
from ..data.files import PREFIX
from ..data.text import open_text
from ..data.tokenization import train_tokenizer
from ..inference.translator import DecodingOptions, Translator
from ..models import fast_paths
from ..models.user_errors import MissingFileError, UserError
from .model_types import config_class_of
from .recipe import Recipe, check_choice, check_corpus, each_corpus
from .trainer import TranslationTrainer, TranslationTrainingArguments


MOST_PARAMETERS = 10**11
# More than tokenizers of trained models have.
MOST_SYMBOLS_OF_TOKENIZERS = 2**18
# Of a parameter while it is trained on the CPU: weight, gradient and Adam's two averages in float32.
TRAINING_BYTES, WEIGHT_BYTES = 16, 4


def check_before_training(
    recipe: Recipe, arguments: TranslationTrainingArguments, from_checkpoint: bool = False
) -> None:
    """
    Checks what a run would otherwise find out after hours: values that contradict each other, files that are not
    there, a model that cannot be built or does not fit the memory. Reads no corpus and writes nothing.

    Args:
        recipe ([`Recipe`]): The run.
        arguments ([`TranslationTrainingArguments`]): Made from it.
        from_checkpoint (`bool`, *optional*, defaults to `False`): Whether the run goes on from one, so that it needs
            no baseline any more.

    Raises:
        UserError: The message names the field, and the remedy.
    """
    recipe.check()
    if not from_checkpoint:
        check_baseline(recipe)
    check_tokenizers(recipe)
    for name, corpora in recipe.corpora():
        for place, corpus in each_corpus(name, corpora):
            check_files(place, check_corpus(place, corpus), recipe)
    fast_paths.setting()  # raises for a wrong value
    model = check_model(recipe)
    check_decoding(recipe)
    check_stages(recipe, arguments)
    check_optimizer(arguments, model)
    check_schedule(arguments)
    if arguments.gradient_checkpointing:
        check_checkpointing(arguments, model)
    check_machinery(arguments)
    if recipe.data.cache_dir:
        check_cache(Path(recipe.data.cache_dir))


def check_baseline(recipe: Recipe) -> None:
    """The model that a warm start needs is there."""
    baseline = recipe.model.init_from
    if baseline is None or not looks_local(baseline):
        return
    for wanted, what in (("config.json", "config.json"), ("*.safetensors", "weights (*.safetensors)")):
        if not list(Path(baseline).glob(wanted)):
            raise MissingFileError(
                f"model.init_from={baseline} holds no model ({what} missing). Remedy: train the baseline first, or "
                "name its folder."
            )


def check_tokenizers(recipe: Recipe) -> None:
    """Folders of tokenizers that are to be loaded are there."""
    for side in ("source", "target"):
        folder = getattr(recipe.tokenizer, side)
        if folder and looks_local(folder) and not (Path(folder) / "tokenizer_config.json").is_file():
            raise MissingFileError(
                f"tokenizer.{side}={folder} holds no tokenizer (tokenizer_config.json is missing). Remedy: name a "
                "folder written by training or `recnmt tokenizer`, or leave it out to train one."
            )


def check_files(place: str, corpus: Corpus, recipe: Recipe) -> None:
    """A corpus' files can be opened and hold something, and its languages are those of the recipe where known."""
    try:
        corpus.check_languages(recipe.data.source_lang, recipe.data.target_lang)
        for path in corpus.local_files():
            check_file(path)
    except FileNotFoundError as error:
        raise MissingFileError(f"{place}: {error}") from None
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    if corpus.dataset and corpus.dataset.startswith(("/", "./", "../", "~")) and not Path(corpus.dataset).exists():
        raise MissingFileError(f"{place}: there is no folder {corpus.dataset}. Remedy: correct the path.")


def check_file(path: str) -> None:
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder. Remedy: name a file in it.")
    try:
        with open_text(path) as file:
            if not file.buffer.read(1):
                raise UserError(f"{path} is empty. Remedy: give a file with at least one sentence.")
    except (OSError, EOFError) as error:
        if isinstance(error, UserError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read ({why}). Remedy: correct the path or its permissions.") from None


def check_cache(folder: Path) -> None:
    """Prepared data can be kept there."""
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


def build_config(recipe: Recipe, **vocabulary: Any) -> PreTrainedConfig:
    """
    The model's configuration.

    Args:
        recipe ([`Recipe`]): Its section `model` says which.
        **vocabulary: Fields that the tokenizers decide, unless `model.fields` does.

    Raises:
        UserError: There is no such model, preset or field, or a value is not allowed.
    """
    section = recipe.model
    config_class = config_class_of(section.type)
    known = {field.name for field in fields(config_class)} | config_class.former_fields
    for name in section.fields:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"write {near[0]}" if near else f"see the fields of {config_class.__name__}"
            raise UserError(
                f"model.fields.{name} is not allowed: {config_class.__name__} has no {name}. Remedy: {hint}."
            )
    if section.preset not in config_class.presets:
        raise UserError(
            f"model.preset={shown(section.preset)} is not allowed; {section.type} has "
            f"{', '.join(config_class.presets)}. Remedy: choose one of them, and say the rest in model.fields."
        )
    try:
        return config_class.from_preset(section.preset, **{**vocabulary, **section.fields})
    except UserError as error:
        raise UserError(f"model.fields: {error}") from error
    except (TypeError, ValueError) as error:  # of transformers, which checks some types itself
        raise UserError(f"model.fields: {error}. Remedy: correct it.") from error


def check_model(recipe: Recipe) -> PreTrainedModel:
    """
    The model can be built, has positions for the longest training sentences, and fits the memory.

    Returns:
        The model on the meta device.

    Raises:
        UserError: It has not; nothing of the model's size was asked for.
    """
    section, tokenizer = recipe.model, recipe.tokenizer
    vocabulary: dict[str, Any] = {}
    if not (section.init_from or tokenizer.source):
        vocabulary = {"vocab_size": tokenizer.vocab_size, "share_encoder_decoder_embeddings": tokenizer.joint}
        if not tokenizer.joint:
            vocabulary["decoder_vocab_size"] = tokenizer.target_vocab_size or tokenizer.vocab_size
    config = build_config(recipe, **vocabulary)
    if config.sides_with_positions:
        for side in config.sides_with_positions:
            longest = getattr(recipe.data, f"max_{side}_length")
            if longest > config.max_position_embeddings:
                raise UserError(
                    f"data.max_{side}_length={longest} is more than the model's positions "
                    f"(max_position_embeddings={config.max_position_embeddings}). Remedy: lower the one, or raise "
                    "model.fields.max_position_embeddings."
                )
        # Made in float64 wherever the weights are.
        refuse_beyond_memory(recipe, 4 * 8 * config.max_position_embeddings * config.d_model, "a table of positions")
    model = without_memory(config)
    count = model.num_parameters()
    if count > MOST_PARAMETERS:
        raise UserError(f"{described(recipe)} has {count:,} parameters. Remedy: lower the largest of model.fields.")
    each = TRAINING_BYTES if recipe.training.get("use_cpu") else WEIGHT_BYTES
    refuse_beyond_memory(recipe, count * each, f"{count:,} parameters")
    return model


def check_decoding(recipe: Recipe) -> None:
    """
    What `decoding.generate` asks for works: a tiny model with random weights translates a word. `generate` checks most
    of its settings only when it uses them, which a run does after training.

    Raises:
        UserError: `generate` rejects a setting.
    """
    options = DecodingOptions(**recipe.decoding)
    if not options.generate:
        return
    given = recipe.model.init_from or recipe.tokenizer.source  # a vocabulary whose size is unknown
    size = MOST_SYMBOLS_OF_TOKENIZERS if given else recipe.tokenizer.vocab_size
    if not recipe.tokenizer.joint:
        size = max(size, recipe.tokenizer.target_vocab_size or 0)
    tokenizer = train_tokenizer(["abcdef"], recipe.tokenizer.target_kind or recipe.tokenizer.kind, 50)
    config_class = config_class_of(recipe.model.type)
    preset = "tiny" if "tiny" in config_class.presets else recipe.model.preset
    config = config_class.from_preset(preset, vocab_size=max(size, len(tokenizer)))
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForSeq2SeqLM.from_config(config)
        short = replace(options, max_length_extra=min(options.max_length_extra, 20), max_length_factor=1)
        try:
            list(Translator(model.eval(), tokenizer, check=False).translate(["abcdef"], short, scores=False))
        except Exception as error:  # of whatever computes what the setting asks for
            said = str(error)
            if not said.startswith("generate="):
                said = f"generate={shown(options.generate)} fails ({first_line(error)}). Remedy: correct it."
            raise UserError(f"decoding.{said}") from error


def without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device: shapes without memory. Leaves the random numbers as they are."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForSeq2SeqLM.from_config(config)
    finally:
        logging.set_verbosity(level)


def check_stages(recipe: Recipe, arguments: TranslationTrainingArguments) -> None:
    """A run in two stages has a baseline to begin with."""
    steps = recipe.training.get("baseline_steps")
    if steps is None:
        return
    if build_config(recipe).baseline() is None:
        raise UserError(
            f"training.baseline_steps={steps} trains the plain model that a variant starts from, and "
            f"{described(recipe)} is a plain one itself. Remedy: set it to null, or choose a variant in model.type, "
            "e.g. biarn_transformer."
        )
    if arguments.deepspeed:
        raise UserError(
            "training.baseline_steps does not go together with training.deepspeed. Remedy: train the baseline in a run "
            "of its own, and name it in model.init_from."
        )


def check_planned_steps(baseline_steps: int, steps: int) -> None:
    """Raises `UserError` when a baseline's stage leaves no step to the variant."""
    if baseline_steps >= steps:
        raise UserError(
            f"training.baseline_steps={baseline_steps} leaves no step for the variant: both stages together have "
            f"{steps}. Remedy: lower it, or raise training.max_steps."
        )


def refuse_beyond_memory(recipe: Recipe, needed: int, what: str) -> None:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise UserError(
            f"{described(recipe)} needs {needed / 2**30:,.1f} GiB for {what}, and this machine has "
            f"{there / 2**30:,.1f}. Remedy: use a smaller preset, or lower the largest of model.fields and "
            "tokenizer.vocab_size."
        )


def described(recipe: Recipe) -> str:
    given = ", ".join(f"{name}={shown(value)}" for name, value in list(recipe.model.fields.items())[:6])
    return f"model: {recipe.model.type} ({recipe.model.preset}{', ' * bool(given)}{given})"


def check_optimizer(arguments: TranslationTrainingArguments, model: PreTrainedModel) -> None:
    """The optimizer is installed and takes its arguments."""
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
    """The learning rate's schedule can be made."""
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
    """What reports, compiles and shards is there; the Trainer would look for it after the data is prepared."""
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
    """Transformers and torch take the arguments of gradient checkpointing: torch's are tried on one number."""
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
    """The compiler's backend and mode exist."""
    import torch._dynamo
    import torch._inductor

    known = set(torch._dynamo.list_backends(None)) & {backend.value.lower() for backend in DynamoBackend}
    choices = {"torch_compile_backend": sorted(known)}
    if arguments.torch_compile_backend == "inductor":
        choices["torch_compile_mode"] = list(torch._inductor.list_mode_options())
    for name, values in choices.items():
        value = getattr(arguments, name)
        if value is not None and value not in values:
            check_choice(f"training.{name}", value, values)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
