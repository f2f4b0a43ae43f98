#!/usr/bin/env python
"""
Logical inference (Tran et al., 2018; Hao et al., 2019, section 4.4): encoders learn the relation between two short
formulas, and are tested on longer ones.

    python scripts/experiments/logical_inference.py scripts/recipes/logic/logical_inference.yaml --plot logic.png
"""

import argparse
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
from logic import MAX_OPERATORS, RELATIONS, WORDS, LogicPair, generate_logic, read_logic
from logic_recipe import LogicRecipe
from sweep import write_results
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
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

from recnmt_hf import ONLSTMTransformerForSequencePairClassification
from recnmt_hf.analysis.plots import QUANTITIES, check_picture, line_panels
from recnmt_hf.commands.arguments import PICTURE_HELP, Parser, add_recipe_arguments
from recnmt_hf.data.files import open_output, reject_model_folder, remove, replacing
from recnmt_hf.data.text import tsv
from recnmt_hf.data.tokenization import END, PAD, SPECIAL_TOKENS, UNKNOWN
from recnmt_hf.errors import UserError
from recnmt_hf.inference.devices import keep_freed_memory
from recnmt_hf.training.checkpoints import (
    FINAL,
    MANIFEST,
    RECIPE,
    discard,
    locked,
    mark_complete,
    newest_intact_checkpoint,
    numbered_in,
)
from recnmt_hf.training.evidence import sum_of_lines
from recnmt_hf.training.processes import Processes, logger, settings_of_one_run


RESULTS = "logic.json"
MAJORITY = "majority class"
# Pairs per batch in tests.
TEST_BATCH = 256


@dataclass
class LogicResult:
    """Result of a model. The dictionaries have numbers of operators as keys."""

    name: str  # in the recipe
    parameters: int
    epochs: float  # passes over the training pairs until the best epoch
    validation: float  # accuracy on the validation pairs
    accuracy: dict[int, float] = field(default_factory=dict)  # on the test pairs
    pairs: dict[int, int] = field(default_factory=dict)  # number of test pairs
    majority: dict[int, float] = field(default_factory=dict)  # accuracy of the most frequent relation


def logic_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of formulas, which adds no tokens."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="right"
    )


def load_logic(recipe: LogicRecipe) -> tuple[list[LogicPair], list[LogicPair], list[list[LogicPair]]]:
    """Return training and validation pairs, in one order, and test pairs by number of operators."""
    data = recipe.data
    if data.folder is None:
        corpus = generate_logic(data.pairs, data.seed)
    else:
        corpus = {
            split: [read_logic(data.folder, split, number) for number in range(most + 1)]
            for split, most in (("train", data.most_operators), ("test", MAX_OPERATORS))
        }
    pairs = [pair for bin_pairs in corpus["train"][: data.most_operators + 1] for pair in bin_pairs]
    validation = pairs[:: data.validation_every]
    training = [pair for number, pair in enumerate(pairs) if number % data.validation_every]
    if not training or not validation:
        raise SystemExit(f"{len(pairs)} pairs are too few; raise data.pairs or data.most_operators")
    return training, validation, corpus["test"]


def tokenized(pairs: Sequence[LogicPair], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Return pairs as the trainer takes them; `length` is that of the longer formula."""
    left, right = (tokenizer([pair[side] for pair in pairs])["input_ids"] for side in (1, 2))
    return Dataset.from_dict(
        {
            "input_ids": left,
            "pair_input_ids": right,
            "labels": [RELATIONS.index(pair.relation) for pair in pairs],
            "length": [max(map(len, both)) for both in zip(left, right, strict=True)],
        }
    )


@dataclass
class PairCollator:
    """Batches of tokenized pairs, padded on the right, for `ONLSTMTransformerForSequencePairClassification`."""

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {"labels": torch.tensor([row["labels"] for row in rows])}
        for prefix in ("", "pair_"):
            ids = [torch.tensor(row[f"{prefix}input_ids"]) for row in rows]
            masks = [torch.ones_like(row) for row in ids]
            batch[f"{prefix}input_ids"] = pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id)
            batch[f"{prefix}attention_mask"] = pad_sequence(masks, batch_first=True)
        return batch


class MarkComplete(TrainerCallback):
    """Marks each checkpoint as complete when it is written. The Trainer deletes all but the best and the newest."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            mark_complete(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")


def accuracy_of(prediction: Any) -> dict[str, float]:
    """Return the accuracy, for the Trainer."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def build_trainer(recipe: LogicRecipe, name: str, folder: Path, train: Dataset, validation: Dataset) -> Trainer:
    """Return the Trainer of a new model of the recipe."""
    settings = recipe.training
    by_plateau = settings.schedule == "plateau"
    arguments = TrainingArguments(
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
        save_total_limit=2,
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
    tokenizer = logic_tokenizer()
    set_seed(settings.seed)
    model = ONLSTMTransformerForSequencePairClassification(recipe.config(name, len(tokenizer)))
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=PairCollator(model.config.pad_token_id or 0),
        compute_metrics=accuracy_of,
        callbacks=[MarkComplete(), *([EarlyStoppingCallback(settings.patience)] if settings.patience else [])],
    )


@settings_of_one_run()
def train_logic(recipe: LogicRecipe, output: str | Path, overwrite: bool = False) -> list[LogicResult]:
    """
    Train each model of a recipe, and test it by number of operators. Finished models are skipped, and a killed one
    resumes from its newest intact checkpoint. The folder `output` gets `logic.tsv` and `logic.json` with the results,
    and for each model a folder with the best one in `model`; `overwrite` deletes the results of an earlier run.

    Exit with a message if the data are missing or damaged, or a folder contains the run of another recipe and
    `overwrite` is not set.
    """
    output = Path(output)
    on_cpu = recipe.training.use_cpu or not torch.accelerator.is_available()
    if on_cpu:
        keep_freed_memory()
    processes = Processes(on_cpu)
    with ExitStack() as stack:
        training, validation, tests = load_logic(recipe)
        checksum = sum_of_lines(" ".join(pair) for pairs in (training, validation, *tests) for pair in pairs)
        contents = {
            output / name: f"# SHA-256 of the pairs: {checksum}\n{recipe.alone(name)}" for name in recipe.models
        }
        processes.on_main(lambda: check_folders(contents, output, overwrite))
        processes.on_main(lambda: prepare_folders(contents, output, overwrite, stack))
        logger.info(f"{len(training)} training pairs, {len(validation)} validation pairs.")
        tokenizer = logic_tokenizer()
        data = {name: tokenized(pairs, tokenizer) for name, pairs in (("train", training), ("valid", validation))}
        results: list[LogicResult] = []
        for number, name in enumerate(recipe.models, start=1):
            result = read_result(output / name)
            logger.info(f"{name} ({number} of {len(recipe.models)}){' is done.' if result else ''}")
            if result is None:
                result = train_model(recipe, name, output / name, data["train"], data["valid"], tests, processes)
            results.append(result)
            processes.on_main(lambda: write_results(results, table_of(results), output / RESULTS))
    return results


def check_folders(contents: Mapping[Path, str], output: Path, overwrite: bool) -> None:
    """
    Check that each model's folder is new, or contains a run of this recipe and data or a run to overwrite. `contents`
    are the texts of the recipe's file in each folder.
    """
    reject_model_folder(output)
    for folder, content in contents.items():
        if (folder / RECIPE).is_file():
            earlier = (folder / RECIPE).read_text(encoding="utf-8")
            if not earlier.startswith("#"):  # of a version that did not record the pairs
                content = content.partition("\n")[2]
            if not overwrite and earlier != content:
                raise SystemExit(f"{folder} has a run of another recipe or other pairs; pass --overwrite to delete it")
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SystemExit(f"{folder} is not empty; choose a new folder")


def prepare_folders(contents: Mapping[Path, str], output: Path, overwrite: bool, stack: ExitStack) -> None:
    """Lock the folder, delete what is to be overwritten and incomplete checkpoints, and write the recipe."""
    stack.enter_context(locked(output))
    check_folders(contents, output, overwrite)
    for folder, content in contents.items():
        if overwrite or not (folder / RECIPE).is_file():
            for path in (folder / part for part in (FINAL, RESULTS)):
                remove(path)
            with open_output(folder / RECIPE) as file:
                file.write(content)
        for _, checkpoint in numbered_in(folder):
            if overwrite or not (checkpoint / MANIFEST).exists():  # of a killed run
                discard(checkpoint)


def train_model(
    recipe: LogicRecipe,
    name: str,
    folder: Path,
    train: Dataset,
    validation: Dataset,
    tests: Sequence[Sequence[LogicPair]],
    processes: Processes,
) -> LogicResult:
    """Train a model, test it, and save it with its result."""
    trainer = build_trainer(recipe, name, folder, train, validation)
    checkpoint = newest_intact_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    accuracy = trainer.evaluate(metric_key_prefix="final")["final_accuracy"]
    evaluated = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    best = max(evaluated, key=lambda entry: entry["eval_accuracy"], default={"epoch": 0.0})
    result = LogicResult(name, model.num_parameters(), best["epoch"], accuracy)
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
        with replacing(folder / FINAL) as working:
            model.save_pretrained(working)
            tokenizer.save_pretrained(working)
        with open_output(folder / RESULTS) as file:
            json.dump(asdict(result), file, indent=1)

    processes.on_main(save)
    return result


def read_result(folder: Path) -> LogicResult | None:
    """Return the result of a finished model, or `None`."""
    if not (folder / RESULTS).exists():
        return None
    content = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    for name in ("accuracy", "pairs", "majority"):
        content[name] = {int(operators): value for operators, value in content[name].items()}
    return LogicResult(**content)


def table_of(results: Sequence[LogicResult]) -> list[list[str]]:
    """Return accuracies in percent: rows for models and the majority class, columns for numbers of operators."""
    numbers = sorted({number for result in results for number in result.accuracy})

    def cells(values: Mapping[int, float]) -> list[str]:
        return [f"{100 * values[number]:.2f}" if number in values else "" for number in numbers]

    rows = [["model", "parameters", "epochs", "validation", *map(str, numbers)]]
    for result in results:
        columns = [result.name, str(result.parameters), f"{result.epochs:g}", f"{100 * result.validation:.2f}"]
        rows.append(columns + cells(result.accuracy))
    rows.append([MAJORITY, "", "", "", *cells(results[0].majority)])
    rows.append(["pairs", "", "", "", *(str(results[0].pairs.get(number, "")) for number in numbers)])
    return rows


def plot_logic(results: Sequence[LogicResult], path: str | Path, most_trained: int) -> None:
    """
    Plot accuracy over the number of operators (Hao et al., 2019, figure 1). A line marks `most_trained`, the maximum in
    training.
    """
    accuracies = {result.name: result.accuracy for result in results} | {MAJORITY: results[0].majority}
    percentages = {name: [(x, 100 * y) for x, y in sorted(points.items())] for name, points in accuracies.items()}
    plot_accuracies(percentages, path, most_trained)


def plot_accuracies(lines: Mapping[str, Sequence[tuple[int, float]]], path: str | Path, most_trained: int) -> None:
    """Plot accuracies in percent over the number of operators, as [`plot_logic`], with a line for each name."""
    title, axis = "Logical inference: accuracy by number of operators", "operators in the longer formula"
    border: dict[str, Any] = {"border": most_trained + 0.5, "border_name": f"training: up to {most_trained} operators"}
    line_panels(path, {"": lines}, axis, title=title, names={"": QUANTITIES["accuracy"]}, **border)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    description = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = Parser(prog="logical_inference.py", **description)
    add_recipe_arguments(
        parser,
        "fields of the recipe to override",
        "folder in which one folder per model is written (default: outputs/NAME-OF-RECIPE)",
    )
    parser.add_argument("--plot", help=f"{PICTURE_HELP} for a plot of accuracy by number of operators")
    parser.add_argument("--overwrite", action="store_true", help="delete results of another recipe in those folders")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.plot is not None:
        check_picture(args.plot)
    recipe = LogicRecipe.from_file(args.recipe, args.overrides)
    output = Path(args.output or Path("outputs") / Path(args.recipe).stem)
    results = train_logic(recipe, output, args.overwrite)
    print(tsv(table_of(results)), end="")
    if args.plot is not None:
        plot_logic(results, args.plot, recipe.data.most_operators)
        print(f"{args.plot}: accuracy of {len(results)} models")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"logical_inference.py: {error}")
