"""
Ten probing tasks (Conneau et al., 2018, "What you can cram into a single vector"): predict length, words, syntax and
meaning of a sentence from its vector in a frozen encoder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._plain_text import control_ids
from ..data.files import open_output, reject_model_folder
from ..data.text import read_lines
from ..errors import MissingFileError, UserError
from ..inference.translator import Translator
from ..models.recurrent_layers import masked_mean
from ..training.processes import logger
from .probing_options import TASKS, ClassifierOptions
from .sentence_states import train_with_early_stopping, vectors_by_name


KINDS = ("surface", "syntactic", "semantic")
PARTS = ("tr", "va", "te")
# This task has a classifier without hidden layer, as in SentEval.
LINEAR_TASK = "word_content"
MAJORITY = "majority class"
# Names of vectors; see `vectors_of`.
FINAL, RECURRENT, ATTENTION, RECURRENCE, GATED = "final", "recurrent", "attention", "recurrence", "gated"


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
    sentence, separated by tabs.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: A line has another form, or a split is missing; the message names file and line.
    """
    folder = Path(folder)
    paths = {task: path for end in ("txt.gz", "txt") for task in TASKS if (path := folder / f"{task}.{end}").is_file()}
    if name not in paths:
        names = ", ".join(paths) or "none"
        raise MissingFileError("probe.missing_task", field=str(folder / f"{name}.txt"), names=names)
    rows: dict[str, list[list[str]]] = {part: [] for part in PARTS}
    for number, line in enumerate(read_lines(paths[name]), start=1):
        part, *row = line.split("\t")
        if part not in PARTS or len(row) != 2 or not all(text.strip() for text in row):
            raise UserError("probe.line", field=str(paths[name]), line=number)
        rows[part].append(row)
    number_of = {label: number for number, label in enumerate(sorted({label for label, _ in rows["tr"]}))}
    for part in PARTS:
        if not rows[part]:
            raise UserError("probe.empty_split", field=str(paths[name]), split=part)
        if unknown := sorted({label for label, _ in rows[part]} - set(number_of)):
            raise UserError("probe.unknown_label", field=str(paths[name]), value=unknown[0], split=part)
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
    control = torch.tensor(sorted(control_ids(translator.tokenizer) | translator.end_ids()))

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
        digest.update(json.dumps(translator.encode_source(sentence)).encode())
    return digest.hexdigest()[:32]


def cached_vectors(
    translator: Translator, sentences: Sequence[str], cache: str | Path | None = None
) -> dict[str, torch.Tensor]:
    """Return [`sentence_vectors`]; a folder `cache` stores them, and later calls load them from there."""
    if cache is None:
        return sentence_vectors(translator, sentences)
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

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

    Raises:
        ValueError: The model has no such vector, a sentence cannot be encoded, or `cache` contains a model.
    """
    if cache is not None:
        reject_model_folder(Path(cache))
    options = options or ClassifierOptions()
    results = []
    for number, task in enumerate(tasks, start=1):
        logger.info(f"{task.name} ({number} of {len(tasks)})")
        sentences = [sentence for part in PARTS for sentence in task.sentences[part]]
        try:
            by_name = cached_vectors(translator, sentences, cache)
        except UserError as error:
            raise error.inside(task.name) from error
        if RECURRENCE in by_name and by_name[RECURRENCE].shape == by_name[FINAL].shape:
            by_name[GATED] = torch.cat([by_name[FINAL], by_name[RECURRENCE]], dim=-1)
        for name in vectors or ():
            if name not in by_name:
                raise UserError("probe.no_vector", value=name, names=", ".join(by_name))
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
