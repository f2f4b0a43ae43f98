"""A training run from a recipe: tokenizers, data, model, training, averaging, test."""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from contextlib import ExitStack
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from .._values import shown
from ..data.corpora import load_pairs, prepare_dataset
from ..data.files import open_output
from ..data.tokenizer_pair import TokenizerPair
from ..evaluation.loading import load_model
from ..evaluation.metrics import sacrebleu_score
from ..evaluation.model_checks import check_padding, stamp_tokenizers
from ..evaluation.translator import DecodingOptions, Translator
from ..models.user_errors import UserError
from .checkpoints import average_checkpoints, choose_checkpoints, newest_checkpoint, newest_intact_checkpoint, steps_of
from .checks import build_config, check_before_training
from .output_folder import (
    DATA,
    FINAL,
    REPLACED,
    RESULTS,
    check_free_space,
    claim_output,
    locked,
    refused_without_trace,
    remove_leftovers,
    replace_folder,
    sudden_ends_explained,
)
from .processes import Processes, progress_bars_on_terminals, say
from .recipe import Recipe
from .resuming import RECIPE, RunRecord, check_config, check_recipe, check_record, digest_of, stopped_early
from .tokenizers import forget_tokenizers, prepare_tokenizers, tokenizers_of
from .trainer import TranslationTrainer, TranslationTrainingArguments


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


def train(recipe: Recipe, output_dir: str | Path, resume: bool = False, overwrite: bool = False) -> Path:
    """
    Trains a model.

    A run may be killed at any moment: resumed, it goes on from the newest intact checkpoint to the very weights that it
    would have had (where it computes alike, as on the CPU).

    Args:
        recipe ([`Recipe`]): What to do.
        output_dir (`str` or `Path`): Gets checkpoints, and the final model in the subfolder `model`.
        resume (`bool`, *optional*, defaults to `False`): Goes on from the newest intact checkpoint, if there is one.
        overwrite (`bool`, *optional*, defaults to `False`): Deletes what an earlier run left there.

    Returns:
        The folder of the final model.

    Raises:
        FileExistsError: The folder holds an earlier run, and neither `resume` nor `overwrite` is set.
        ValueError, FileNotFoundError: Something is wrong with recipe or data, a resumed run was made with other ones,
            another run writes into the folder, or the disk is full.
    """
    output_dir = Path(output_dir)
    settings = recipe.training
    use_cpu = bool(settings.get("use_cpu", not torch.accelerator.is_available()))
    if use_cpu:
        keep_freed_memory()
    processes = Processes(use_cpu, settings.get("ddp_timeout", 1800), settings.get("ddp_backend"))
    arguments, patience = training_arguments(recipe, output_dir, use_cpu)
    check_before_training(recipe, arguments, from_checkpoint=resume and newest_checkpoint(output_dir) is not None)
    with ExitStack() as held:
        before_training = ExitStack()

        def claim() -> Path | None:
            killed = held.enter_context(locked(output_dir))
            held.enter_context(before_training)  # ends before the lock does
            if claim_output(output_dir, resume, overwrite, killed):
                before_training.enter_context(refused_without_trace(output_dir))
            return point_of_return(recipe, output_dir) if resume else None

        checkpoint = processes.on_main(claim)
        held.enter_context(sudden_ends_explained(output_dir))
        held.enter_context(progress_bars_on_terminals(processes.is_main))
        set_seed(arguments.seed)

        tokenizers, train_data, validation_data = processes.main_first(
            lambda: prepare_inputs(recipe, output_dir, checkpoint)
        )
        count = f"{processes.count} process" + "es" * (processes.count > 1)
        pairs = f"{len(train_data)} training pairs, {len(validation_data)} validation pairs"
        say(f"{pairs}; {count} on {processes.state.device}.")

        model = build_model(recipe, *tokenizers)
        say(f"{type(model).__name__} with {model.num_parameters() / 1e6:.2f}M parameters.")

        def check_and_record() -> None:
            record = RunRecord(
                processes.count,
                arguments.gradient_accumulation_steps,
                digest_of(train_data),
                len(train_data),
                digest_of(validation_data),
                len(validation_data),
                processes.state.device.type,
            )
            if checkpoint is not None:
                check_config(model.config, checkpoint)
                for sentence in check_record(record, recipe, output_dir, checkpoint):
                    say(sentence)
            check_free_space(output_dir, model, arguments)
            recipe.save(output_dir / RECIPE)
            record.save(output_dir)

        processes.on_main(check_and_record)
        if checkpoint is None and recipe.model.init_from:
            say(f"Warm start from {recipe.model.init_from}: {model.init_from_baseline(recipe.model.init_from)}.")
        trainer = TranslationTrainer(
            model,
            arguments,
            tokenizer=tokenizers.source,
            target_tokenizer=tokenizers.target,
            train_dataset=train_data,
            eval_dataset=validation_data,
            callbacks=[EarlyStoppingCallback(patience)] if patience else [],
        )
        before_training.close()
        train_on(trainer, checkpoint, patience)
        final = output_dir / FINAL
        processes.on_main(lambda: finish(recipe, output_dir, arguments, final, trainer))
    return final


def point_of_return(recipe: Recipe, output_dir: Path) -> Path | None:
    """
    The checkpoint from which a run goes on; what a killed one left half-done is deleted.

    Raises:
        ValueError: All checkpoints are damaged, or the recipe is not the one they were made with.
    """
    remove_leftovers(output_dir)
    checkpoint = newest_intact_checkpoint(output_dir, say)
    if checkpoint is None:
        say("No complete checkpoint: training from the start.")
        forget_tokenizers(output_dir)  # they may be another recipe's
        return None
    for sentence in check_recipe(recipe, output_dir, checkpoint):
        say(sentence)
    say(f"Resuming from {checkpoint}.")
    return checkpoint


def prepare_inputs(recipe: Recipe, output_dir: Path, checkpoint: Path | None) -> tuple[TokenizerPair, Dataset, Dataset]:
    """Tokenizers (a resumed run's are those of its checkpoint), training and validation data."""
    tokenizers = prepare_tokenizers(recipe, output_dir) if checkpoint is None else tokenizers_of(checkpoint)
    cache_dir = recipe.data.cache_dir or str(output_dir / DATA)
    train_data, validation_data = (prepare(recipe, split, *tokenizers, cache_dir) for split in ("train", "validation"))
    return tokenizers, train_data, validation_data


def train_on(trainer: TranslationTrainer, checkpoint: Path | None, patience: int | None) -> None:
    """Trains to the end, from the start or from a checkpoint; the last step has a checkpoint of its own."""
    arguments = trainer.args
    if checkpoint is not None:
        if arguments.should_save:
            trainer.rotate()  # which a killed run may have left undone
        # The Trainer would make one step more before it looks at the limit.
        if steps_of(checkpoint) >= arguments.max_steps > 0:
            say(f"{checkpoint.name} has all {arguments.max_steps} steps already.")
            return
        if stopped_early(checkpoint, patience):
            say(f"{checkpoint.name} ended the run by early stopping.")
            return
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    newest = newest_checkpoint(arguments.output_dir)
    if newest is None or steps_of(newest) != trainer.state.global_step:
        trainer._save_checkpoint(trainer.model, None)


def training_arguments(
    recipe: Recipe, output_dir: Path, use_cpu: bool | None = None
) -> tuple[TranslationTrainingArguments, int | None]:
    """The Trainer's arguments, and the patience of early stopping."""
    settings = {"disable_tqdm": not sys.stderr.isatty(), **recipe.training}
    if use_cpu is not None:
        settings["use_cpu"] = use_cpu
    patience = settings.pop("early_stopping_patience", None)
    if recipe.average.which == "best":
        settings["keep_best"] = max(settings.get("keep_best", 1), recipe.average.count)
    else:
        settings["keep_last"] = max(settings.get("keep_last", 1), recipe.average.count)
    try:
        return TranslationTrainingArguments(output_dir=str(output_dir), **settings), patience
    except UserError as error:
        raise UserError(f"training.{error}") from error
    except Exception as error:  # of whatever transformers calls to make sense of a value
        what = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"{blamed(settings, str(output_dir))}: {what}. Remedy: correct it, or leave it out.") from error


def blamed(settings: dict[str, Any], output_dir: str) -> str:
    """Those fields, with their values, without any one of which the Trainer's arguments can be made."""
    found = []
    for name, value in settings.items():
        try:
            TranslationTrainingArguments(output_dir=output_dir, **{n: v for n, v in settings.items() if n != name})
        except Exception:
            continue
        found.append(f"training.{name}={shown(value)}")
    return ", ".join(found) or "training"


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
    check_padding(source_tokenizer, target_tokenizer)
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
    stamp_tokenizers(config, source_tokenizer, target_tokenizer)
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
    replace_folder(working, final, output_dir / REPLACED)
    if recipe.test:
        results = test(recipe, final, arguments)
        results["averaged"] = [folder.name for folder in chosen]
        with open_output(output_dir / RESULTS) as file:
            json.dump(results, file, indent=2)


def refresh_norms(folder: Path, trainer: TranslationTrainer) -> None:
    """
    Takes the running averages of batch norms anew from training batches, for weights that no training step had: their
    mean over checkpoints is not that of the averaged weights (as for the averages of Izmailov et al., 2018). Dropout is
    off, as in translating. Does nothing for models without such norms.
    """
    model = load_model(folder, trainer.args.device)
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
        with open_output(Path(model).parent / f"{FINAL}-{name}.{recipe.data.target_lang}") as file:
            file.writelines(f"{text}\n" for text in found)
        lowercase = bool(recipe.training.get("bleu_lowercase"))
        score = sacrebleu_score(found, [pair.target for pair in pairs], lowercase=lowercase)
        say(f"{name}: {score}")
        results[name] = {"bleu": score.score, "signature": score.signature, "sentences": len(pairs)}
    return results
