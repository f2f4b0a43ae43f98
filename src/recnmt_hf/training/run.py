"""A training run from a recipe: tokenizers, data, model, training, averaging, test."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..data.corpora import load_pairs, prepare_dataset
from ..data.text import SentencePair
from ..data.tokenization import load_tokenizer, train_tokenizer
from ..evaluation.metrics import sacrebleu_score
from ..evaluation.translator import TARGET_TOKENIZER, DecodingOptions, Translator, load_target_tokenizer, looks_local
from ..models.user_errors import ExistingFileError, MissingFileError, UserError
from .checkpoints import average_checkpoints, choose_checkpoints, newest_checkpoint
from .checks import build_config, check_before_training
from .recipe import Recipe
from .trainer import TranslationTrainer, TranslationTrainingArguments


FINAL = "model"
# Batches over which the averages of batch norm are taken anew for averaged weights.
NORM_BATCHES = 200


def keep_freed_memory() -> None:
    """
    Has glibc keep the large blocks that training frees and asks for again at every step.

    By default it returns them to the system, and the kernel clears their pages anew each time, which takes a quarter
    of a small model's training step on the CPU. Does nothing with other allocators.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    try:
        library = ctypes.CDLL(None)
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)
    except (AttributeError, OSError, TypeError):
        return


def say(text: str) -> None:
    """Tells the user what happens now, once for all processes."""
    if PartialState().is_main_process:
        print(text, file=sys.stderr, flush=True)


def train(recipe: Recipe, output_dir: str | Path, resume: bool = False, overwrite: bool = False) -> Path:
    """
    Trains a model.

    Args:
        recipe ([`Recipe`]): What to do.
        output_dir (`str` or `Path`): Gets checkpoints, and the final model in the subfolder `model`.
        resume (`bool`, *optional*, defaults to `False`): Goes on from the newest complete checkpoint, if there is one.
        overwrite (`bool`, *optional*, defaults to `False`): Deletes what an earlier run left there.

    Returns:
        The folder of the final model.

    Raises:
        FileExistsError: The folder holds an earlier run, and neither `resume` nor `overwrite` is set.
        ValueError, FileNotFoundError: Something is wrong with recipe or data.
    """
    output_dir = Path(output_dir)
    if not torch.accelerator.is_available():
        recipe.training.setdefault("use_cpu", True)
    if recipe.training.get("use_cpu"):
        keep_freed_memory()
    state = PartialState(cpu=bool(recipe.training.get("use_cpu")))
    arguments, patience = training_arguments(recipe, output_dir)
    check_before_training(recipe, arguments, from_checkpoint=resume and newest_checkpoint(output_dir) is not None)
    if state.is_main_process:
        claim_output(output_dir, resume, overwrite)
        recipe.save(output_dir / "recipe.yaml")
    state.wait_for_everyone()
    set_seed(arguments.seed)

    with state.main_process_first():
        source_tokenizer, target_tokenizer = prepare_tokenizers(recipe, output_dir)
        cache_dir = recipe.data.cache_dir or str(output_dir / "data")
        train_data = prepare(recipe, "train", source_tokenizer, target_tokenizer, cache_dir)
        validation_data = prepare(recipe, "validation", source_tokenizer, target_tokenizer, cache_dir)
    processes = f"{state.num_processes} process" + "es" * (state.num_processes > 1)
    say(f"{len(train_data)} training pairs, {len(validation_data)} validation pairs; {processes} on {state.device}.")

    model = build_model(recipe, source_tokenizer, target_tokenizer)
    say(f"{type(model).__name__} with {model.num_parameters() / 1e6:.2f}M parameters.")
    checkpoint = newest_checkpoint(output_dir) if resume else None
    if checkpoint is None and recipe.model.init_from:
        say(f"Warm start from {recipe.model.init_from}: {model.init_from_baseline(recipe.model.init_from)}.")
    if resume:
        say(f"Resuming from {checkpoint}." if checkpoint else "No complete checkpoint: training from the start.")

    trainer = TranslationTrainer(
        model,
        arguments,
        tokenizer=source_tokenizer,
        target_tokenizer=target_tokenizer,
        train_dataset=train_data,
        eval_dataset=validation_data,
        callbacks=[EarlyStoppingCallback(patience)] if patience else [],
    )
    if checkpoint is not None and steps_of(checkpoint) >= arguments.max_steps > 0:
        # The Trainer would make one step more before it looks at the limit.
        say(f"{checkpoint.name} has all {arguments.max_steps} steps already.")
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        newest = newest_checkpoint(output_dir)
        if newest is None or steps_of(newest) != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model, None)
    final = output_dir / FINAL
    if state.is_main_process:
        finish(recipe, output_dir, arguments, final, trainer)
    state.wait_for_everyone()
    return final


def claim_output(output_dir: Path, resume: bool, overwrite: bool) -> None:
    """Makes sure the run may write into its folder."""
    traces = [path for path in output_dir.glob("*") if path.name != "data"] if output_dir.is_dir() else []
    if traces and not resume and not overwrite:
        raise ExistingFileError(
            f"{output_dir} is not empty ({', '.join(sorted(path.name for path in traces)[:4])}). Remedy: go on with "
            "--resume, delete it with --overwrite, or choose another folder."
        )
    if traces and overwrite and not resume:
        known = re.compile(
            rf"checkpoint-\d+|{FINAL}|{FINAL}\.partial|{FINAL}-[\w.-]+\.\w+|tokenizer|{TARGET_TOKENIZER}"
            r"|recipe\.yaml|results\.json|runs"
        )
        foreign = [path.name for path in traces if not known.fullmatch(path.name)]
        if foreign:
            raise ExistingFileError(
                f"{output_dir} holds files that no training run wrote ({', '.join(foreign[:4])}); they stay. "
                "Remedy: choose another folder."
            )
        for path in traces:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    output_dir.mkdir(parents=True, exist_ok=True)


def training_arguments(recipe: Recipe, output_dir: Path) -> tuple[TranslationTrainingArguments, int | None]:
    """The Trainer's arguments, and the patience of early stopping."""
    settings = dict(recipe.training)
    patience = settings.pop("early_stopping_patience", None)
    if recipe.average.which == "best":
        settings["keep_best"] = max(settings.get("keep_best", 1), recipe.average.count)
    else:
        settings["keep_last"] = max(settings.get("keep_last", 1), recipe.average.count)
    try:
        return TranslationTrainingArguments(output_dir=str(output_dir), **settings), patience
    except UserError as error:
        raise UserError(f"training.{error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"training: {' '.join(str(error).split())} Remedy: change these fields.") from error


def prepare_tokenizers(recipe: Recipe, output_dir: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Loads or trains the tokenizers; joint ones are the same object. A warm start keeps those of its baseline."""
    section, baseline = recipe.tokenizer, recipe.model.init_from
    if section.source:
        source = load_tokenizer(section.source)
        return source, (source if section.joint else load_tokenizer(section.target or section.source))
    source_folder, target_folder = output_dir / "tokenizer", output_dir / TARGET_TOKENIZER
    joint = not target_folder.is_dir() if baseline else section.joint
    if all((folder / "tokenizer.json").is_file() for folder in [source_folder, target_folder][: 2 - joint]):
        source = load_tokenizer(source_folder)
        return source, (source if joint else load_tokenizer(target_folder))
    if baseline:
        source, target = tokenizers_of(baseline)
        say(f"The tokenizers are those of {baseline}; none is trained.")
        source.save_pretrained(str(source_folder))  # resuming needs no baseline
        if target is not source:
            target.save_pretrained(str(target_folder))
        return source, target

    def texts(side: str) -> Iterator[str]:
        data = recipe.data
        pairs: Iterator[SentencePair] = load_pairs(data.train, data.source_lang, data.target_lang, data.on_empty)
        for pair in islice(pairs, section.max_sentences):
            if side != "target":
                yield pair.source
            if side != "source":
                yield pair.target

    settings = {"min_frequency": section.min_frequency, "lowercase": section.lowercase}
    say(f"Training the {'joint ' if section.joint else ''}{section.kind} tokenizer.")
    source = train_tokenizer(texts("both" if section.joint else "source"), section.kind, section.vocab_size, **settings)
    source.save_pretrained(str(source_folder))
    if section.joint:
        return source, source
    target = train_tokenizer(
        texts("target"),
        section.target_kind or section.kind,
        section.target_vocab_size or section.vocab_size,
        **settings,
    )
    target.save_pretrained(str(target_folder))
    return source, target


def tokenizers_of(baseline: str) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """The tokenizers of a trained model; with one vocabulary they are the same object."""
    folder = Path(baseline)
    if looks_local(baseline) and not (folder / "config.json").is_file():
        raise MissingFileError(
            f"model.init_from={baseline} holds no model (config.json is missing). Remedy: train the baseline first, or "
            "name its folder."
        )
    source = load_tokenizer(baseline)
    return source, load_target_tokenizer(baseline) or source


def prepare(
    recipe: Recipe,
    split: str,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    cache_dir: str,
) -> Dataset:
    """The tokenized training or validation data."""
    data, training = recipe.data, split == "train"
    # Validation keeps its long sentences, as far as the model has positions for them.
    room = recipe.model.fields.get("max_position_embeddings", 1024) - 1
    return prepare_dataset(
        data.train if training else data.validation,
        data.source_lang,
        data.target_lang,
        source_tokenizer,
        target_tokenizer,
        cache_dir,
        max_source_length=data.max_source_length if training else max(room, data.max_source_length),
        max_target_length=data.max_target_length if training else max(room, data.max_target_length),
        max_length_ratio=data.max_length_ratio if training else None,
        on_empty=data.on_empty,
        num_proc=data.num_proc,
        keep_text=not training,
    )


def build_model(
    recipe: Recipe, source_tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """A fresh model whose vocabulary is that of the tokenizers."""
    joint = target_tokenizer is source_tokenizer
    vocabulary = {
        "vocab_size": len(source_tokenizer),
        "decoder_vocab_size": len(target_tokenizer),
        "share_encoder_decoder_embeddings": joint,
        "pad_token_id": target_tokenizer.pad_token_id,
        "eos_token_id": target_tokenizer.eos_token_id,
        "bos_token_id": target_tokenizer.bos_token_id,
        "decoder_start_token_id": first_not_none(target_tokenizer.bos_token_id, target_tokenizer.pad_token_id),
    }
    for name in ("vocab_size", "decoder_vocab_size"):
        given = recipe.model.fields.get(name)
        if isinstance(given, int) and given < vocabulary[name]:
            raise UserError(
                f"model.fields.{name}={given} is smaller than the tokenizer's {vocabulary[name]} symbols. Remedy: "
                "leave it out, or train a smaller tokenizer."
            )
    config = build_config(recipe, **vocabulary)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config = generation_config(config, recipe)
    return model


def first_not_none(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def generation_config(config: Any, recipe: Recipe) -> GenerationConfig:
    """What `model.generate` does when told nothing: the recipe's beams (Vaswani's penalty is the Translator's)."""
    options = DecodingOptions(**recipe.decoding)
    return GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        max_length=min(config.max_position_embeddings, 256),
        num_beams=options.beams,
    )


def steps_of(checkpoint: Path) -> int:
    """The training steps that a checkpoint's name tells."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def finish(
    recipe: Recipe,
    output_dir: Path,
    arguments: TranslationTrainingArguments,
    final: Path,
    trainer: TranslationTrainer,
) -> None:
    """Averages checkpoints into the final model and tests it."""
    metric = f"eval_{(arguments.metric_for_best_model or 'loss').removeprefix('eval_')}"
    better = arguments.greater_is_better is not False
    chosen = choose_checkpoints(output_dir, recipe.average.count, recipe.average.which, metric, better)
    say(f"Final model: the average of {', '.join(folder.name for folder in chosen)}.")
    working = output_dir / f"{FINAL}.partial"
    shutil.rmtree(working, ignore_errors=True)
    average_checkpoints(chosen, working)
    if len(chosen) > 1:
        refresh_norms(working, trainer)
    shutil.rmtree(final, ignore_errors=True)
    working.rename(final)
    if recipe.test:
        results = test(recipe, final, arguments)
        results["averaged"] = [folder.name for folder in chosen]
        (output_dir / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")


def refresh_norms(folder: Path, trainer: TranslationTrainer) -> None:
    """
    Takes the running averages of batch norms anew from training batches, for weights that no training step had: their
    mean over checkpoints is not that of the averaged weights (as for the averages of Izmailov et al., 2018). Dropout is
    off, as in translating. Does nothing for models without such norms.
    """
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to(trainer.args.device).eval()
    norms = [module for module in model.modules() if isinstance(getattr(module, "running_mean", None), torch.Tensor)]
    if not norms:
        return
    sampler = trainer.token_sampler(trainer.train_dataset, shuffle=True)
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad():
        for count, batch in enumerate(islice(trainer.loader(trainer.train_dataset, sampler), NORM_BATCHES), start=1):
            for norm in norms:
                norm.train()
                norm.momentum = 1 / count  # the mean of all batches so far
            inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
            model.get_encoder()(**inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
    say(f"Running averages of {len(norms)} batch norms taken anew from {count} training batches.")
    model.save_pretrained(folder)


def test(recipe: Recipe, model: str | Path, arguments: TranslationTrainingArguments | None = None) -> dict[str, Any]:
    """Translates the recipe's test sets, keeps the translations beside the model, and returns the scores."""
    device = None if arguments is None else arguments.device
    translator = Translator.from_pretrained(model, device=device)
    options = DecodingOptions(**recipe.decoding)
    results: dict[str, Any] = {"decoding": {f.name: getattr(options, f.name) for f in fields(options)}}
    for name, corpora in recipe.test.items():
        pairs = list(load_pairs(corpora, recipe.data.source_lang, recipe.data.target_lang, recipe.data.on_empty))
        with torch.no_grad():
            found = [each.text for each in translator.translate((pair.source for pair in pairs), options)]
        (Path(model).parent / f"{FINAL}-{name}.{recipe.data.target_lang}").write_text(
            "".join(f"{text}\n" for text in found), encoding="utf-8"
        )
        lowercase = bool(recipe.training.get("bleu_lowercase"))
        score = sacrebleu_score(found, [pair.target for pair in pairs], lowercase=lowercase)
        say(f"{name}: {score}")
        results[name] = {"bleu": score.score, "signature": score.signature, "sentences": len(pairs)}
    return results
