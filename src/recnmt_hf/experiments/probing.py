"""
Ten probing tasks (Conneau et al., 2018, "What you can cram into a single vector"): what a sentence vector of a frozen
encoder says of the sentence's length, words, syntax and meaning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._plain_text import control_ids
from ..data.files import open_output, refuse_model_folder
from ..data.text import read_lines
from ..inference.translator import Translator
from ..models.recurrent_layers import masked_mean
from ..models.user_errors import MissingFileError, UserError
from ..training.processes import logger
from .probing_options import TASKS, ClassifierOptions
from .sentence_states import vectors_by_name


KINDS = ("surface", "syntactic", "semantic")
PARTS = ("tr", "va", "te")
# Which of a thousand words a sentence has is asked without a hidden layer, as SentEval does.
WITHOUT_HIDDEN_LAYER = "word_content"
MAJORITY = "majority class"
# Vectors and what they are; a model has some of them.
FINAL, RECURRENT, ATTENTION, RECURRENCE, GATED = "final", "recurrent", "attention", "recurrence", "gated"


@dataclass(frozen=True)
class Setting:
    """Of a classifier: size of its hidden layer (0: none), dropout in it, weight decay."""

    hidden: int
    dropout: float
    l2: float


@dataclass
class ProbeResult:
    """
    Result of the classifiers of one task for one kind of vector.

    Attributes:
        task (`str`): As its file is named.
        vector (`str`): Its name, or `majority class`.
        dim (`int`): Its size.
        accuracy (`float`): On the test sentences, of the setting that was best in validation.
        validation (`float`): Of that setting.
        setting (`dict`): Hidden size, dropout and weight decay.
        epochs (`int`): Passes over the training sentences until its best.
    """

    task: str
    vector: str
    dim: int
    accuracy: float
    validation: float
    setting: dict[str, float]
    epochs: int


@dataclass
class Task:
    """Sentences and labels of a probing task, by part."""

    name: str
    sentences: dict[str, list[str]]
    labels: dict[str, torch.Tensor]
    classes: int


# -- data --------------------------------------------------------------------------------------------------------------


def file_of(folder: Path, name: str) -> Path | None:
    """A task's file, gzipped perhaps."""
    return next((path for ending in ("txt", "txt.gz") if (path := folder / f"{name}.{ending}").is_file()), None)


def read_task(folder: str | Path, name: str) -> Task:
    """
    A task in SentEval's format: lines of part (tr, va, te), label and sentence, parted by tabs.

    Args:
        folder (`str` or `Path`): Holds `<name>.txt`, gzipped perhaps.
        name (`str`): One of `TASKS`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not of that form, or a part is missing; the message names file and line.
    """
    folder = Path(folder)
    path = file_of(folder, name)
    if path is None:
        there = [each for each in TASKS if file_of(folder, each) is not None]
        raise MissingFileError(
            f"There is no {folder / name}.txt; of probing tasks {folder} has {', '.join(there) or 'none'}. Remedy: "
            "correct the folder, or name those tasks."
        )
    sentences: dict[str, list[str]] = {part: [] for part in PARTS}
    words: dict[str, list[str]] = {part: [] for part in PARTS}
    for number, line in enumerate(read_lines(path), start=1):
        part, *rest = line.split("\t")
        if part not in PARTS or len(rest) != 2 or not all(each.strip() for each in rest):
            raise UserError(
                f"{path}, line {number}: no part (tr, va or te), label and sentence parted by tabs. Remedy: correct it."
            )
        words[part].append(rest[0])
        sentences[part].append(rest[1])
    for part in PARTS:
        if not sentences[part]:
            raise UserError(f"{path} has no line of the part {part}. Remedy: correct the file.")
    number_of = {label: number for number, label in enumerate(sorted(set(words["tr"])))}
    for part in PARTS[1:]:
        unknown = sorted(set(words[part]) - set(number_of))
        if unknown:
            raise UserError(
                f"{path}: the label {unknown[0]!r} of the part {part} is none of the part tr. Remedy: correct the file."
            )
    labels = {part: torch.tensor([number_of[label] for label in found]) for part, found in words.items()}
    return Task(name, sentences, labels, len(number_of))


# -- vectors -----------------------------------------------------------------------------------------------------------


def vectors_of(output: Any, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """
    The sentence vectors of an encoder's output, `(batch_size, dim)`, each a mean over tokens: `final`, of what the
    decoder reads; `recurrent` and `attention`, of the top recurrent and the top attention layer of a hybrid (HO and HS
    of Hao et al., 2019); `recurrence`, of a recurrence encoder (H_r; `final` is H_e); and `global`, of a model that has
    one vector per sentence.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch_size, source_length)`): 1 for tokens that count.
    """
    yield FINAL, masked_mean(output.last_hidden_state, attention_mask)
    for name in (RECURRENT, ATTENTION):
        states = getattr(output, f"{name}_hidden_state", None)
        if states is not None:
            yield name, masked_mean(states, attention_mask)
    memories = output.memories() if hasattr(output, "memories") else {}
    for name, memory in memories.items():
        if name == "encoder":
            continue
        if memory.states.dim() == 2:
            yield name, memory.states
        else:
            # Steps of another number than words are all real; an RNN's have the words' mask.
            is_of_words = memory.states.shape[1] == attention_mask.shape[1] and memory.token_mask is not None
            yield name, masked_mean(memory.states, attention_mask if is_of_words else memory.token_mask)


def sentence_vectors(
    translator: Translator, sentences: Sequence[str], max_tokens: int = 4096
) -> dict[str, torch.Tensor]:
    """
    All vectors that a model's encoder gives for sentences, `(len(sentences), dim)`, float32, on the CPU. The mean runs
    over the tokens of the text: neither padding nor the end token count.

    Raises:
        ValueError: A sentence has no token, or more than the model has positions for.
    """
    control = torch.tensor(sorted(control_ids(translator.tokenizer) | translator.end_ids()))
    sources = [translator.encode_source(sentence) for sentence in sentences]
    for number, source in enumerate(sources, start=1):
        if translator.is_empty(source):
            raise UserError(f"Sentence {number} has no token that the model knows. Remedy: leave it out.")
        translator.check_lengths(len(source), 0, f"Sentence {number}")

    def read(output: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return vectors_of(output, attention_mask.masked_fill(torch.isin(input_ids, control.to(input_ids.device)), 0))

    return vectors_by_name(translator, sources, read, max_tokens)


def digest_of(translator: Translator, sentences: Sequence[str]) -> str:
    """Return what vectors depend on: the encoder's weights, the model's configuration, the tokens."""
    model = translator.inspected_model()
    digest = hashlib.sha256(json.dumps(model.config.to_diff_dict(), sort_keys=True, default=str).encode())
    for name, tensor in model.get_encoder().state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for sentence in sentences:
        digest.update(json.dumps(translator.encode_source(sentence)).encode())
    return digest.hexdigest()[:32]


def cached_vectors(
    translator: Translator, sentences: Sequence[str], cache: str | Path | None = None
) -> dict[str, torch.Tensor]:
    """As [`sentence_vectors`]; with a folder `cache` they are kept there, and taken from there the next time."""
    if cache is None:
        return sentence_vectors(translator, sentences)
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

    path = Path(cache) / f"vectors-{digest_of(translator, sentences)}.safetensors"
    if path.is_file():
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            logger.info(f"{path} is damaged ({error}) and made anew.")
    found = sentence_vectors(translator, sentences)
    with open_output(path, binary=True) as file:
        file.write(save({name: vectors.contiguous() for name, vectors in found.items()}))
    return found


# -- classifiers -------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """
    A classifier of vectors: `W2 sigmoid(Drop(W1 x + b1)) + b2`, or `W2 x + b2` without hidden layer.

    Args:
        setting ([`Setting`]): Its hidden layer.
        dim (`int`): Of the vectors.
        classes (`int`): Of the labels.
        gated (`bool`, *optional*, defaults to `False`): Whether vectors are pairs `[a; b]` of that size each, which a
            gate combines first: `g = sigmoid(W [a; b] + c)`, `x = g a + (1 - g) b` (Hao et al., 2019, "Modeling
            Recurrence for Transformer").
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
        """Logits `(batch_size, classes)` of vectors `(batch_size, dim)`, or `(batch_size, 2 * dim)` of pairs."""
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(vectors))
            first, second = vectors.chunk(2, dim=-1)
            vectors = gate * first + (1 - gate) * second
        return self.layers(vectors)


def settings_of(options: ClassifierOptions, task: str) -> list[Setting]:
    """All settings that are tried for a task."""
    if options.classifier == "logistic" or task == WITHOUT_HIDDEN_LAYER:
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
    Trains a classifier until its validation accuracy no longer rises.

    Args:
        vectors, labels (`dict`): By part; the vectors `(sentences, dim)`, pairs `(sentences, 2 * dim)` where `gated`.

    Returns:
        Its best validation accuracy, the test accuracy of the same weights, and after how many passes that was.
    """
    # Vectors of any scale are learnt from alike.
    mean, deviation = vectors["tr"].mean(dim=0), vectors["tr"].std(dim=0, unbiased=False).clamp(min=1e-6)
    inputs = {part: ((each - mean) / deviation).to(device) for part, each in vectors.items()}
    wanted = {part: each.to(device) for part, each in labels.items()}
    order = torch.Generator().manual_seed(options.seed)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        classifier = Classifier(setting, mean.shape[0] // (1 + gated), classes, gated).to(device)
        optimizer = torch.optim.Adam(classifier.parameters(), lr=options.learning_rate, weight_decay=setting.l2)

        @torch.no_grad()
        def accuracy(part: str) -> float:
            classifier.eval()
            found = torch.cat([classifier(each).argmax(dim=-1) for each in inputs[part].split(4096)])
            classifier.train()
            return (found == wanted[part]).float().mean().item()

        best, tested, passes, epoch, waited = -1.0, 0.0, 0, 0, 0
        while epoch < options.epochs and waited < options.patience:
            for _ in range(min(options.every, options.epochs - epoch)):
                for chosen in torch.randperm(len(wanted["tr"]), generator=order).split(options.batch_size):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(classifier(inputs["tr"][chosen]), wanted["tr"][chosen]).backward()
                    optimizer.step()
                epoch += 1
            waited += 1
            if (reached := accuracy("va")) > best:
                best, tested, passes, waited = reached, accuracy("te"), epoch, 0
    return best, tested, passes


def probe(
    translator: Translator,
    tasks: Sequence[Task],
    vectors: Sequence[str] | None = None,
    options: ClassifierOptions | None = None,
    cache: str | Path | None = None,
    report: Callable[[str], None] = logger.info,
) -> list[ProbeResult]:
    """
    Accuracies of classifiers that read one vector of a sentence, for each task and each vector of the model.

    Args:
        translator ([`Translator`]): Of any model; its weights stay as they are.
        tasks (sequence of [`Task`]): See [`read_task`].
        vectors (sequence of `str`, *optional*): Which, as [`vectors_of`] names them, or `gated`: final and recurrence
            combined by a gate. `None`: all that the model has.
        options ([`ClassifierOptions`], *optional*): How to train.
        cache (`str` or `Path`, *optional*): A folder where the model's vectors are kept.
        report (`Callable`, *optional*): Called with the name of each task when it starts.

    Returns:
        For each task what naming the most frequent label reaches, and a result for each vector.

    Raises:
        ValueError: The model has no such vector, a sentence cannot be encoded, or `cache` holds a model.
    """
    if cache is not None:
        refuse_model_folder(Path(cache))
    options = options or ClassifierOptions()
    results = []
    for number, task in enumerate(tasks, start=1):
        report(f"{task.name} ({number} of {len(tasks)})")
        every = [sentence for part in PARTS for sentence in task.sentences[part]]
        try:
            found = cached_vectors(translator, every, cache)
        except UserError as error:
            raise UserError(f"{task.name}: {error}") from error
        if RECURRENCE in found and found[RECURRENCE].shape == found[FINAL].shape:
            found[GATED] = torch.cat([found[FINAL], found[RECURRENCE]], dim=-1)
        for name in vectors or []:
            if name not in found:
                raise UserError(f"The model gives no vector {name!r}. Remedy: choose of {', '.join(found)}.")
        results.append(majority_of(task))
        sizes = [len(task.sentences[part]) for part in PARTS]
        settings = settings_of(options, task.name)
        for name in vectors or found:
            parts = dict(zip(PARTS, found[name].split(sizes), strict=True))
            device = translator.model.device
            trained = [
                train_classifier(parts, task.labels, task.classes, setting, options, name == GATED, device)
                for setting in settings
            ]
            # The best in validation; the first of equally good ones.
            chosen = max(range(len(settings)), key=lambda place: trained[place][0])
            setting, (validation, accuracy, epochs) = settings[chosen], trained[chosen]
            dim = found[FINAL if name == GATED else name].shape[1]
            results.append(ProbeResult(task.name, name, dim, accuracy, validation, asdict(setting), epochs))
    return results


def majority_of(task: Task) -> ProbeResult:
    """Return the accuracy of the most frequent label of the training sentences."""
    label = torch.bincount(task.labels["tr"]).argmax()
    validation, accuracy = ((task.labels[part] == label).float().mean().item() for part in ("va", "te"))
    return ProbeResult(task.name, MAJORITY, 0, accuracy, validation, {}, 0)


def table_of(results: Sequence[ProbeResult]) -> list[list[str]]:
    """Test accuracies in percent: a row for each task and the means of each kind of tasks, below the vectors' names."""
    columns = list(dict.fromkeys(each.vector for each in results))
    tasks = list(dict.fromkeys(each.task for each in results))
    accuracy = {(each.task, each.vector): 100 * each.accuracy for each in results}
    rows = [["task", "kind", *columns]]
    for task in tasks:
        rows.append([TASKS[task][0], TASKS[task][1], *(f"{accuracy[task, column]:.2f}" for column in columns)])
    for kind in KINDS:
        of_kind = [task for task in tasks if TASKS[task][1] == kind]
        if of_kind:
            means = [sum(accuracy[task, column] for task in of_kind) / len(of_kind) for column in columns]
            rows.append([f"mean of {len(of_kind)}", kind, *(f"{mean:.2f}" for mean in means)])
    return rows
