#!/usr/bin/env python
"""
Ten probing tasks (Conneau et al., 2018, "What you can cram into a single vector"): predict length, words, syntax and
meaning of a sentence from its vector in a frozen encoder.

    python scripts/experiments/probing.py outputs/onlstm/model senteval/probing --output probing.csv
"""

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from sentence_states import ProbeOptions, optional_output, train_with_early_stopping, vectors_by_name
from torch import nn

from recnmt_hf import Translator
from recnmt_hf._plain_text import control_ids
from recnmt_hf.commands import arguments
from recnmt_hf.data.files import open_output, reject_model_folder
from recnmt_hf.data.text import read_lines, tsv
from recnmt_hf.errors import UserError
from recnmt_hf.inference.model_settings import end_ids
from recnmt_hf.models.recurrent_layers import masked_mean
from recnmt_hf.options import Range, option
from recnmt_hf.training.processes import logger


# Name of SentEval's file -> name in the papers' tables, kind of information
TASKS = {
    "sentence_length": ("SeLen", "surface"),
    "word_content": ("WC", "surface"),
    "tree_depth": ("TrDep", "syntactic"),
    "top_constituents": ("ToCo", "syntactic"),
    "bigram_shift": ("BShif", "syntactic"),
    "past_present": ("Tense", "semantic"),
    "subj_number": ("SubN", "semantic"),
    "obj_number": ("ObjN", "semantic"),
    "odd_man_out": ("SoMo", "semantic"),
    "coordination_inversion": ("CoIn", "semantic"),
}
KINDS = ("surface", "syntactic", "semantic")
PARTS = ("tr", "va", "te")
# This task has a classifier without hidden layer, as in SentEval.
LINEAR_TASK = "word_content"
MAJORITY = "majority class"
# Names of vectors; see `vectors_of`.
FINAL, RECURRENT, ATTENTION, RECURRENCE, GATED = "final", "recurrent", "attention", "recurrence", "gated"


@dataclass
class ClassifierOptions(ProbeOptions):
    """Training of a classifier: Adam; the setting and epoch with the best validation accuracy are tested."""

    epochs: Annotated[int, Range(least=1, most=10_000)] = option(200, "maximum passes over the training sentences")
    patience: Annotated[int, Range(least=1)] = option(5, "evaluations without a better accuracy before training stops")
    classifier: str = option(
        "mlp",
        "mlp: a hidden layer with sigmoid; logistic: no hidden layer, as always for word_content",
        choices=("mlp", "logistic"),
    )
    hidden: Annotated[list[int], Range(least=1, most=10_000)] = field(
        default_factory=lambda: [50, 100, 200], metadata={"help": "sizes of the hidden layer to try"}
    )
    dropout: Annotated[list[float], Range(least=0, below=1)] = field(
        default_factory=lambda: [0.0, 0.1, 0.2], metadata={"help": "dropout rates to try, before the sigmoid"}
    )
    l2: Annotated[list[float], Range(least=0)] = field(
        default_factory=lambda: [1e-5, 1e-4, 1e-3, 1e-2],
        metadata={"help": "weight decays of logistic classifiers to try"},
    )
    every: Annotated[int, Range(least=1)] = option(4, "passes between evaluations of the validation accuracy")


OPTIONS = [entry.name for entry in fields(ClassifierOptions)]


@dataclass(frozen=True)
class Setting:
    """Setting of a classifier: size of its hidden layer (0: none), dropout in it, weight decay."""

    hidden: int
    dropout: float
    l2: float


@dataclass
class ProbeResult:
    """Result of the classifiers of one task for one kind of vector."""

    task: str  # name of its file
    vector: str  # name of the vector, or `majority class`
    dim: int  # size of the vector
    accuracy: float  # on the test sentences, of the setting with the best validation accuracy
    validation: float
    setting: dict[str, float]  # hidden size, dropout and weight decay
    epochs: int  # passes over the training sentences until the best weights


@dataclass
class Task:
    """Sentences and labels of a probing task, by part."""

    name: str
    sentences: dict[str, list[str]]
    labels: dict[str, torch.Tensor]
    classes: int


def read_task(folder: str | Path, name: str) -> Task:
    """
    Read a task in SentEval's format from `<name>.txt` or `<name>.txt.gz`: lines of split (tr, va, te), label and
    sentence, separated by tabs. Exit with a message if the file does not exist, a line has another form, or a split is
    missing.
    """
    folder = Path(folder)
    paths = {task: path for end in ("txt.gz", "txt") for task in TASKS if (path := folder / f"{task}.{end}").is_file()}
    if name not in paths:
        names = ", ".join(paths) or "none"
        raise SystemExit(f"{folder / name}.txt does not exist; correct the folder, or select its tasks: {names}")
    rows: dict[str, list[list[str]]] = {part: [] for part in PARTS}
    for number, line in enumerate(read_lines(paths[name]), start=1):
        part, *row = line.split("\t")
        if part not in PARTS or len(row) != 2 or not all(text.strip() for text in row):
            expected = f"split ({', '.join(PARTS)}), label and sentence, separated by tabs"
            raise SystemExit(f"{paths[name]}, line {number}: expected {expected}")
        rows[part].append(row)
    number_of = {label: number for number, label in enumerate(sorted({label for label, _ in rows["tr"]}))}
    for part in PARTS:
        if not rows[part]:
            raise SystemExit(f"{paths[name]} has no lines of the split {part}")
        if unknown := sorted({label for label, _ in rows[part]} - set(number_of)):
            raise SystemExit(f"{paths[name]}: the label {unknown[0]!r} of the split {part} is missing in the split tr")
    labels = {part: torch.tensor([number_of[label] for label, _ in rows[part]]) for part in PARTS}
    return Task(name, {part: [sentence for _, sentence in rows[part]] for part in PARTS}, labels, len(number_of))


def vectors_of(output: Any, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield names and sentence vectors `(batch_size, dim)` of an encoder's output, all but the last means over the tokens
    with mask 1: `final`, of the states that the decoder reads; `recurrent` and `attention`, of the top recurrent and
    the top attention layer of a hybrid (HO and HS of Hao et al., 2019); `recurrence`, of a recurrence encoder (H_r;
    `final` is H_e); and `global`, of a model with one vector per sentence.
    """
    yield FINAL, masked_mean(output.last_hidden_state, attention_mask)
    for name in (RECURRENT, ATTENTION):
        states = getattr(output, f"{name}_hidden_state", None)
        if states is not None:
            yield name, masked_mean(states, attention_mask)
    memories = output.memories() if hasattr(output, "memories") else {}
    for name, (states, mask, _) in memories.items():
        if states.dim() == 2:
            yield name, states
        elif name != "encoder":
            # The states of an RNN have the mask of the words; steps of another number have their own or none.
            is_of_words = mask is not None and states.shape[1] == attention_mask.shape[1]
            yield name, masked_mean(states, attention_mask if is_of_words else mask)


def sentence_vectors(translator: Translator, sentences: Sequence[str]) -> dict[str, torch.Tensor]:
    """
    Return all vectors of a model's encoder for sentences, as [`vectors_by_name`] does. Means do not include padding and
    the end token.
    """
    control = torch.tensor(sorted(control_ids(translator.tokenizer) | end_ids(translator.model)))

    def read(output: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return vectors_of(output, attention_mask.masked_fill(torch.isin(input_ids, control.to(input_ids.device)), 0))

    return vectors_by_name(translator, sentences, read)


def digest_of(translator: Translator, sentences: Sequence[str]) -> str:
    """Return a checksum of the encoder's weights, the configuration and the tokens, which determine the vectors."""
    model = translator.inspected_model()
    digest = hashlib.sha256(json.dumps(model.config.to_diff_dict(), sort_keys=True, default=str).encode())
    for name, tensor in model.get_encoder().state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    for sentence in sentences:
        digest.update(json.dumps(translator.encode_source(sentence).ids).encode())
    return digest.hexdigest()[:32]


def cached_vectors(
    translator: Translator, sentences: Sequence[str], cache: str | Path | None = None
) -> dict[str, torch.Tensor]:
    """Return [`sentence_vectors`]; a folder `cache` stores them, and later calls load them from there."""
    if cache is None:
        return sentence_vectors(translator, sentences)
    path = Path(cache) / f"vectors-{digest_of(translator, sentences)}.safetensors"
    if path.is_file():
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            logger.info(f"{path} is damaged ({error}) and will be computed again.")
    by_name = sentence_vectors(translator, sentences)
    with open_output(path, binary=True) as file:
        file.write(save({name: vectors.contiguous() for name, vectors in by_name.items()}))
    return by_name


class Classifier(nn.Module):
    """
    A classifier of vectors of size `dim`: `W2 sigmoid(Drop(W1 x + b1)) + b2`, or `W2 x + b2` without hidden layer. With
    `gated` its inputs are pairs `[a; b]` of vectors, which a gate combines first: `g = sigmoid(W [a; b] + c)`,
    `x = g a + (1 - g) b` (Hao et al., 2019, "Modeling Recurrence for Transformer").
    """

    def __init__(self, setting: Setting, dim: int, classes: int, gated: bool = False):
        super().__init__()
        self.gate = nn.Linear(2 * dim, dim) if gated else None
        if setting.hidden:
            hidden = (nn.Linear(dim, setting.hidden), nn.Dropout(setting.dropout), nn.Sigmoid())
            self.layers = nn.Sequential(*hidden, nn.Linear(setting.hidden, classes))
        else:
            self.layers = nn.Sequential(nn.Linear(dim, classes))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits `(batch_size, classes)` of vectors `(batch_size, dim)`, or of pairs `(batch_size, 2 * dim)`."""
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(vectors))
            first, second = vectors.chunk(2, dim=-1)
            vectors = gate * first + (1 - gate) * second
        return self.layers(vectors)


def settings_of(options: ClassifierOptions, task: str) -> list[Setting]:
    """Return all settings to try for a task."""
    if options.classifier == "logistic" or task == LINEAR_TASK:
        return [Setting(0, 0.0, l2) for l2 in options.l2]
    return [Setting(hidden, dropout, 0.0) for hidden in options.hidden for dropout in options.dropout]


def train_classifier(
    vectors: Mapping[str, torch.Tensor],
    labels: Mapping[str, torch.Tensor],
    classes: int,
    setting: Setting,
    options: ClassifierOptions,
    gated: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[float, float, int]:
    """
    Train a classifier until its validation accuracy no longer rises. Vectors `(sentences, dim)` (pairs `(sentences,
    2 * dim)` if `gated`) and labels are given by split. Return its best validation accuracy, the test accuracy of the
    same weights, and the number of passes until then.
    """
    # Standardized, so that the scale of vectors has no effect.
    mean, deviation = vectors["tr"].mean(dim=0), vectors["tr"].std(dim=0, unbiased=False).clamp(min=1e-6)
    inputs = {part: ((values - mean) / deviation).to(device) for part, values in vectors.items()}
    targets = {part: values.to(device) for part, values in labels.items()}
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        classifier = Classifier(setting, mean.shape[0] // (1 + gated), classes, gated).to(device)

        def loss(batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(classifier(inputs["tr"][batch]), targets["tr"][batch])

        @torch.no_grad()
        def accuracy(part: str) -> float:
            classifier.eval()
            predictions = torch.cat([classifier(batch).argmax(dim=-1) for batch in inputs[part].split(4096)])
            classifier.train()
            return (predictions == targets[part]).float().mean().item()

        sizes = len(targets["tr"]), options, options.every, setting.l2
        best, passes, _ = train_with_early_stopping(classifier, loss, lambda: accuracy("va"), *sizes)
        return best, accuracy("te"), passes


def probe(
    translator: Translator,
    tasks: Sequence[Task],
    vectors: Sequence[str] | None = None,
    options: ClassifierOptions | None = None,
    cache: str | Path | None = None,
) -> list[ProbeResult]:
    """
    Train classifiers of the sentence vectors of any model, for each task and each vector. `vectors` are their names, as
    in [`vectors_of`], or `gated`, final and recurrence combined by a gate; by default all of the model. They are stored
    in the folder `cache`.

    Returns:
        For each task the result of the most frequent label, then one for each vector.

    Exit with a message if the model has no such vector, or a sentence cannot be encoded.
    """
    if cache is not None:
        reject_model_folder(Path(cache))
    options = options or ClassifierOptions()
    results = []
    for number, task in enumerate(tasks, start=1):
        logger.info(f"{task.name} ({number} of {len(tasks)})")
        sentences = [sentence for part in PARTS for sentence in task.sentences[part]]
        by_name = cached_vectors(translator, sentences, cache)
        if RECURRENCE in by_name and by_name[RECURRENCE].shape == by_name[FINAL].shape:
            by_name[GATED] = torch.cat([by_name[FINAL], by_name[RECURRENCE]], dim=-1)
        for name in vectors or ():
            if name not in by_name:
                raise SystemExit(f"The model has no vector {name!r}; choose from {', '.join(by_name)}")
        results.append(majority_of(task))
        for name in vectors or by_name:
            sizes = [len(task.sentences[part]) for part in PARTS]
            parts = dict(zip(PARTS, by_name[name].split(sizes), strict=True))
            device = translator.model.device
            trained = [
                (setting, *train_classifier(parts, task.labels, task.classes, setting, options, name == GATED, device))
                for setting in settings_of(options, task.name)
            ]
            # The best validation accuracy, and the first setting that has it.
            setting, validation, accuracy, epochs = max(trained, key=lambda result: result[1])
            dim = by_name[FINAL if name == GATED else name].shape[1]
            results.append(ProbeResult(task.name, name, dim, accuracy, validation, asdict(setting), epochs))
    return results


def majority_of(task: Task) -> ProbeResult:
    """Return the accuracy of the most frequent label of the training sentences."""
    label = torch.bincount(task.labels["tr"]).argmax()
    validation, accuracy = ((task.labels[part] == label).float().mean().item() for part in ("va", "te"))
    return ProbeResult(task.name, MAJORITY, 0, accuracy, validation, {}, 0)


def table_of(results: Sequence[ProbeResult]) -> list[list[str]]:
    """Return test accuracies in percent: rows for tasks and means over kinds of tasks, columns for vectors."""
    columns = list(dict.fromkeys(result.vector for result in results))
    tasks = list(dict.fromkeys(result.task for result in results))
    accuracy = {(result.task, result.vector): 100 * result.accuracy for result in results}
    rows = [["task", "kind", *columns]]
    for task in tasks:
        rows.append([*TASKS[task], *(f"{accuracy[task, column]:.2f}" for column in columns)])
    for kind in KINDS:
        members = [task for task in tasks if TASKS[task][1] == kind]
        if members:
            means = [sum(accuracy[task, column] for task in members) / len(members) for column in columns]
            rows.append([f"mean of {len(members)}", kind, *(f"{mean:.2f}" for mean in means)])
    return rows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    description = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = arguments.Parser(prog="probing.py", **description)
    add = parser.add_argument
    add("model", help=arguments.MODEL_HELP)
    add("data", type=Path, help="folder with the tasks' files in SentEval's format, e.g. tree_depth.txt")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="tasks (default: all ten)")
    vectors = (
        "final, recurrent and attention (HO and HS of a hybrid), recurrence (H_r), gated (H_e and H_r by a gate), "
        "global (default: all vectors of the model)"
    )
    add("--vectors", nargs="+", help=vectors)
    arguments.add_options(parser, ClassifierOptions, OPTIONS)
    add("--cache", help="folder in which the vectors are stored for later runs (default: none)")
    add("--output", "-o", help="file to which the table is also written; .csv: separated by commas")
    add("--json", help="JSON file for all figures (default: none)")
    arguments.add_device_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    options = arguments.read_options(ClassifierOptions, args, OPTIONS)
    tasks = [read_task(args.data, name) for name in dict.fromkeys(args.tasks)]
    inputs = [str(path) for path in args.data.iterdir()]
    with optional_output(args.output, inputs) as table, optional_output(args.json, inputs) as figures:
        results = probe(arguments.load_translator(args), tasks, args.vectors, options, args.cache)
        rows = table_of(results)
        print(tsv(rows), end="")
        if table is not None:
            is_csv = str(args.output).lower().endswith((".csv", ".csv.gz"))
            csv.writer(table, delimiter="," if is_csv else "\t", lineterminator="\n").writerows(rows)
        if figures is not None:
            json.dump([asdict(result) for result in results], figures, indent=1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"probing.py: {error}")
