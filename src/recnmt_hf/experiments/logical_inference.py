"""
Logical inference (Tran et al., 2018; Hao et al., 2019, section 4.4): which relation two formulas have, for encoders
that are trained on short formulas and tested on long ones.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from .._values import shown
from ..data.files import open_output, refuse_model_folder, remove
from ..data.logic import MOST_OPERATORS, RELATIONS, SPLITS, WORDS, LogicPair, generate_logic, read_logic
from ..data.tokenization import END, PAD, SPECIAL_TOKENS, UNKNOWN
from ..models.modeling_onlstm_transformer import ONLSTMTransformerForSequencePairClassification
from ..models.user_errors import ExistingFileError, UserError
from ..training.checkpoints import MANIFEST, discard, mark_complete, newest_intact_checkpoint, numbered_in
from ..training.output_folder import FINAL, RECIPE, REPLACED, locked, replace_folder
from ..training.processes import Processes, keep_freed_memory, logger, progress_bars_on_terminals, settings_of_one_run
from .logic_recipe import LogicRecipe


RESULTS, TABLE = "logic.json", "logic.tsv"
PARTIAL_MODEL = f"{FINAL}.partial"
MAJORITY = "majority class"
# Pairs of a batch that is tested; no gradients are kept for them.
TEST_BATCH = 256


@dataclass
class LogicResult:
    """
    Result of a model.

    Attributes:
        name (`str`): Of the model in its recipe.
        parameters (`int`): Of the model.
        epochs (`float`): Passes over the training pairs after which it was best.
        validation (`float`): Accuracy on the validation pairs, with the weights that were kept.
        accuracy (`dict[int, float]`): By number of operators, of the test pairs.
        pairs (`dict[int, int]`): How many these are.
        majority (`dict[int, float]`): What naming the pairs' most frequent relation would reach.
    """

    name: str
    parameters: int
    epochs: float
    validation: float
    accuracy: dict[int, float] = field(default_factory=dict)
    pairs: dict[int, int] = field(default_factory=dict)
    majority: dict[int, float] = field(default_factory=dict)


# -- data --------------------------------------------------------------------------------------------------------------


def logic_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of formulas: their words, nothing added."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="right"
    )


def load_logic(recipe: LogicRecipe) -> tuple[list[LogicPair], list[LogicPair], list[list[LogicPair]]]:
    """Pairs to train on and for validation, in one order, and those to test on by number of operators."""
    data = recipe.data
    numbers = range(MOST_OPERATORS + 1)
    if data.folder is None:
        corpus = generate_logic(data.pairs, data.seed)
    else:
        wanted = {"train": range(data.most_operators + 1), "test": numbers}
        corpus = {split: [read_logic(data.folder, split, number) for number in wanted[split]] for split in SPLITS}
    training = [pair for of_bin in corpus["train"][: data.most_operators + 1] for pair in of_bin]
    validation = training[:: data.validation_every]
    training = [pair for number, pair in enumerate(training) if number % data.validation_every]
    if not training or not validation:
        raise UserError(
            f"{len(training) + len(validation)} pairs are too few to train on. Remedy: raise data.pairs or "
            "data.most_operators."
        )
    return training, validation, corpus["test"]


def tokenized(pairs: Sequence[LogicPair], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Pairs as the trainer takes them; `length` is that of the longer formula."""
    left, right = (tokenizer([each[side] for each in pairs])["input_ids"] for side in (1, 2))
    return Dataset.from_dict(
        {
            "input_ids": left,
            "pair_input_ids": right,
            "labels": [RELATIONS.index(pair.relation) for pair in pairs],
            "length": [max(map(len, both)) for both in zip(left, right, strict=True)],
        }
    )


class PairCollator:
    """
    Batches of tokenized pairs, padded on the right, for [`ONLSTMTransformerForSequencePairClassification`].

    Args:
        pad_token_id (`int`): Stands behind shorter sentences.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {"labels": torch.tensor([row["labels"] for row in rows])}
        for prefix in ("", "pair_"):
            ids = [torch.tensor(row[f"{prefix}input_ids"]) for row in rows]
            padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id)
            lengths = torch.tensor([len(each) for each in ids])
            batch[f"{prefix}input_ids"] = padded
            batch[f"{prefix}attention_mask"] = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        return batch


# -- training ----------------------------------------------------------------------------------------------------------


class KeepBestAndNewest(TrainerCallback):
    """Marks each checkpoint that is written whole; only then older ones go, but for the best."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir))
        newest = folder / f"checkpoint-{state.global_step}"
        mark_complete(newest)
        for _, checkpoint in numbered_in(folder):
            if checkpoint.name not in (newest.name, Path(state.best_model_checkpoint or newest).name):
                discard(checkpoint)


def logic_arguments(recipe: LogicRecipe, folder: Path) -> TrainingArguments:
    """The Trainer's arguments."""
    settings = recipe.training
    by_plateau = settings.schedule == "plateau"
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=TEST_BATCH,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="reduce_lr_on_plateau" if by_plateau else settings.schedule,
        lr_scheduler_kwargs={"factor": 0.5, "patience": 0, "mode": "max"} if by_plateau else None,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        bf16=settings.bf16,
        use_cpu=settings.use_cpu or not torch.accelerator.is_available(),
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        greater_is_better=True,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        logging_steps=500,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        restore_callback_states_from_checkpoint=True,
        ddp_find_unused_parameters=False,
    )


def accuracy_of(prediction: Any) -> dict[str, float]:
    """The share of right answers, for the Trainer."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def build_trainer(
    recipe: LogicRecipe, name: str, folder: Path, train: Dataset | None, validation: Dataset | None
) -> Trainer:
    """A fresh model of the recipe in its Trainer."""
    tokenizer = logic_tokenizer()
    arguments = logic_arguments(recipe, folder)
    set_seed(recipe.training.seed)
    model = ONLSTMTransformerForSequencePairClassification(recipe.config(name, len(tokenizer)))
    patience = recipe.training.patience
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=PairCollator(model.config.pad_token_id or 0),
        compute_metrics=accuracy_of,
        callbacks=[KeepBestAndNewest(), *([EarlyStoppingCallback(patience)] if patience else [])],
    )


@settings_of_one_run()
def train_logic(recipe: LogicRecipe, output: str | Path, overwrite: bool = False) -> list[LogicResult]:
    """
    Trains each model of a recipe and tests it by number of operators. What is done already is kept, and what was
    killed goes on from its newest whole checkpoint.

    Args:
        recipe ([`LogicRecipe`]): What to do.
        output (`str` or `Path`): Gets a folder for each model, with the best one in its subfolder `model`, and
            `logic.tsv` and `logic.json` with the results.
        overwrite (`bool`, *optional*, defaults to `False`): Deletes what an earlier run of a model left there.

    Returns:
        A [`LogicResult`] for each model.

    Raises:
        FileExistsError: A folder holds the run of another recipe, and `overwrite` is not set.
        ValueError, FileNotFoundError: The data are missing or not as they should be.
    """
    output = Path(output)
    on_cpu = recipe.training.use_cpu or not torch.accelerator.is_available()
    if on_cpu:
        keep_freed_memory()
    processes = Processes(on_cpu)
    with ExitStack() as held:
        held.enter_context(progress_bars_on_terminals(processes.is_main))
        processes.on_main(lambda: check_folders(recipe, output, overwrite))
        training, validation, tests = load_logic(recipe)
        processes.on_main(lambda: prepare_folders(recipe, output, overwrite, held))
        logger.info(f"{len(training)} training pairs, {len(validation)} validation pairs.")
        tokenizer = logic_tokenizer()
        data = {name: tokenized(pairs, tokenizer) for name, pairs in (("train", training), ("valid", validation))}
        results: list[LogicResult] = []
        for number, name in enumerate(recipe.models, start=1):
            folder = output / name
            found = read_result(folder)
            if found is None:
                logger.info(f"{name} ({number} of {len(recipe.models)})")
                found = train_one(recipe, name, folder, data["train"], data["valid"], tests, processes)
            else:
                logger.info(f"{name} ({number} of {len(recipe.models)}) is done.")
            results.append(found)
            processes.on_main(lambda: write_results(results, output))
    return results


def check_folders(recipe: LogicRecipe, output: Path, overwrite: bool) -> None:
    """Makes sure that each model's folder is new, or holds a run of this very recipe, or one that may be deleted."""
    refuse_model_folder(output)
    for name in recipe.models:
        folder = output / name
        stated = folder / RECIPE
        if stated.is_file():
            if not overwrite and stated.read_text(encoding="utf-8") != recipe.alone(name):
                raise ExistingFileError(
                    f"{folder} holds a run of another recipe. Remedy: choose another folder, or delete it with "
                    "--overwrite."
                )
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ExistingFileError(f"{folder} is not empty. Remedy: choose another folder.")


def prepare_folders(recipe: LogicRecipe, output: Path, overwrite: bool, held: ExitStack) -> None:
    """Locks the folder, deletes what is to be overwritten and what a killed run left half-done, states the recipe."""
    held.enter_context(locked(output))
    check_folders(recipe, output, overwrite)
    for name in recipe.models:
        folder = output / name
        if overwrite and (folder / RECIPE).is_file():
            written = [checkpoint for _, checkpoint in numbered_in(folder)]
            for path in (*written, *(folder / each for each in (FINAL, REPLACED, PARTIAL_MODEL, RESULTS))):
                remove(path)
        if overwrite or not (folder / RECIPE).is_file():
            with open_output(folder / RECIPE) as file:
                file.write(recipe.alone(name))
        for _, checkpoint in numbered_in(folder):
            if not (checkpoint / MANIFEST).exists():  # a killed run's
                discard(checkpoint)


def train_one(
    recipe: LogicRecipe,
    name: str,
    folder: Path,
    train: Dataset,
    validation: Dataset,
    tests: Sequence[Sequence[LogicPair]],
    processes: Processes,
) -> LogicResult:
    """Trains a model, tests it, and saves it with its result."""
    trainer = build_trainer(recipe, name, folder, train, validation)
    checkpoint = newest_intact_checkpoint(folder, logger.info)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    reached = trainer.evaluate(metric_key_prefix="final")["final_accuracy"]
    result = LogicResult(name, sum(each.numel() for each in model.parameters()), best_epoch(trainer), reached)
    tokenizer = logic_tokenizer()
    for operators, pairs in enumerate(tests):
        if not pairs:
            continue
        metrics = trainer.predict(tokenized(pairs, tokenizer)).metrics
        relations = Counter(pair.relation for pair in pairs)
        result.accuracy[operators] = (metrics or {})["test_accuracy"]
        result.pairs[operators] = len(pairs)
        result.majority[operators] = max(relations.values()) / len(pairs)

    def save() -> None:
        working = folder / PARTIAL_MODEL
        model.save_pretrained(working)
        tokenizer.save_pretrained(working)
        replace_folder(working, folder / FINAL, folder / REPLACED)
        with open_output(folder / RESULTS) as file:
            json.dump(asdict(result), file, indent=1)

    processes.on_main(save)
    return result


def best_epoch(trainer: Trainer) -> float:
    """The epoch of the checkpoint that was kept."""
    evaluated = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    return max(evaluated, key=lambda entry: entry["eval_accuracy"])["epoch"] if evaluated else 0.0


def read_result(folder: Path) -> LogicResult | None:
    """The result of a finished model."""
    try:
        found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RESULTS} cannot be read ({error}). Remedy: delete it.") from error
    for name in ("accuracy", "pairs", "majority"):
        found[name] = {int(operators): value for operators, value in found[name].items()}
    return LogicResult(**found)


# -- results -----------------------------------------------------------------------------------------------------------


def table_of(results: Sequence[LogicResult]) -> list[list[str]]:
    """Accuracies in percent, a row for each model and one for the majority class, below the numbers of operators."""
    numbers = sorted({number for each in results for number in each.accuracy})
    rows = [["model", "parameters", "epochs", "validation", *(str(number) for number in numbers)]]

    def cells(values: Mapping[int, float]) -> list[str]:
        return [f"{100 * values[number]:.2f}" if number in values else "" for number in numbers]

    for each in results:
        head = [each.name, str(each.parameters), f"{each.epochs:g}", f"{100 * each.validation:.2f}"]
        rows.append(head + cells(each.accuracy))
    rows.append([MAJORITY, "", "", "", *cells(results[0].majority)])
    rows.append(["pairs", "", "", "", *(str(results[0].pairs.get(number, "")) for number in numbers)])
    return rows


def write_results(results: Sequence[LogicResult], output: Path) -> None:
    with open_output(output / RESULTS) as file:
        json.dump([asdict(each) for each in results], file, indent=1)
    with open_output(output / TABLE) as file:
        file.writelines("\t".join(row) + "\n" for row in table_of(results))


def plot_logic(results: Sequence[LogicResult], path: str | Path, most_trained: int) -> None:
    """
    Accuracy above the number of operators (Hao et al., 2019, figure 1), for `.png`, `.svg` or `.pdf`.

    Args:
        results (sequence of [`LogicResult`]).
        most_trained (`int`): The operators of the longest formulas trained on, where a line is drawn.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is unknown.
    """
    from ..analysis.plots import lines_over_numbers

    if not results:
        raise UserError(f"There is no result for {shown(str(path))}. Remedy: train a model.")
    lines = {each.name: each.accuracy for each in results} | {MAJORITY: results[0].majority}
    lines_over_numbers(path, lines, "operators", "accuracy", most_trained + 0.5)
