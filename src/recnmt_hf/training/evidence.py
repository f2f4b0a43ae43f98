"""Evidence: a file beside the weights of a model that records its training and its scores."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from .._loading_errors import folder_of_model, read_small_text
from .._version import __version__
from ..data.files import locked_file, open_output
from ..errors import UserError, shorten
from ..inference.model_settings import EVIDENCE as EVIDENCE
from ..inference.options import DecodingOptions
from ..models.user_errors import masked
from ..options import check_options, check_value
from .checkpoints import TRANSLATIONS as TRANSLATIONS
from .recipe import Recipe
from .sections import TRAINING_DEFAULTS


FORMAT = 1
# Values of the log that curves show.
LOGGED = re.compile(r"loss|alignment_loss|learning_rate|(eval|mean)_.*(?<!_runtime)(?<!_per_second)")
# Settings that do not affect training, or are private.
PRIVATE = ("cache_dir", "output_dir", "logging_dir", "hub_token", "run_name", "report_to", "num_proc", "project")
# Parts of a text: URLs, each link of a chained one (`zip://a.en::/data/corpus.zip`), and anything else between blanks,
# quotes, brackets and separators.
PARTS = re.compile(r"""(?!(?i:file):)[A-Za-z][\w+.-]*://[^/\s,;"'<>|]((?!::)[^\s,;"'<>|])*|[^\s,;"'<>|:=`()\[\]{}]+""")


@dataclass
class TestScore:
    """Scores of a model on a test set."""

    __test__ = False  # for pytest

    name: str
    scores: dict[str, float]  # by metric, e.g. `{"bleu": 38.2}`
    signature: str  # of the metric
    sentences: int
    source_sha256: str  # of the sentences, one per line
    reference_sha256: str  # of all references, one set after the other
    decoding: dict[str, Any]  # beams, penalty, and all options that are not the default
    translations: str  # file in the model's folder
    baseline: str | None = None  # model of the comparison
    baseline_scores: dict[str, float] = field(default_factory=dict)
    p_value: float | None = None
    test: str | None = None  # of significance
    dataset: list[dict[str, Any]] = field(default_factory=list)  # corpora of the test set, as in recipes
    references: int = 1  # number of references per sentence
    length_ratio: float | None = None  # words of the translations over words of the references
    seen: int | None = None  # sentences that are also in the training text
    clean_scores: dict[str, float] = field(default_factory=dict)  # without these

    def __post_init__(self) -> None:
        self.dataset, self.baseline = without_private(self.dataset), without_private(self.baseline)


def average_of(tests: Sequence[TestScore]) -> dict[str, float]:
    """Return the mean scores of several test sets; empty if there is one, or if their metrics differ."""
    if len(tests) < 2 or len({test.signature for test in tests}) > 1:
        return {}
    kinds = [kind for kind in tests[0].scores if all(kind in test.scores for test in tests)]
    return {kind: mean(test.scores[kind] for test in tests) for kind in kinds}


def refuse_links(*paths: Path) -> None:
    """Raise `UserError` for a symbolic link, so that a downloaded folder cannot lead writers out of itself."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link and will not be written.", field=path)


@dataclass
class Evidence:
    """Evidence of a model; a field that is not known is empty."""

    model: dict[str, Any] = field(default_factory=dict)  # type, parameters and preset
    languages: list[str] = field(default_factory=list)  # source and target
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)  # values that differ from defaults, by section
    data: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)  # loss and validation by step
    versions: dict[str, str] = field(default_factory=dict)
    base_model: str | None = None  # on the Hub, that initialized this one; the recipe names local ones
    example: str = ""  # sentence to try it on
    tests: list[TestScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recipe = without_private(self.recipe)

    @classmethod
    def load(cls, folder: str | Path) -> Evidence:
        """Load the evidence of a model's or run's folder; empty without one, `UserError` if the file is not valid."""
        path = Path(folder_of_model(folder)) / EVIDENCE
        if not path.is_file():
            return cls()
        try:
            content = dict(json.loads(read_small_text(path)))
            known = {entry.name: content[entry.name] for entry in fields(cls) if entry.name in content}
            evidence = cls(**{**known, "tests": [TestScore(**test) for test in known.get("tests", [])]})
            check_options(evidence)
            for number, row in enumerate(evidence.curve):
                check_value(f"curve[{number}].step", row.get("step"), int)
            for number, score in enumerate(evidence.tests):
                check_options(score, f"tests[{number}].")
                DecodingOptions(**score.decoding)
            json.dumps(asdict(evidence), ensure_ascii=False).encode()  # raises for what could not be saved after a test
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not valid evidence of a model ({shorten(str(error))}).", field=path) from error
        return evidence

    def save(self, folder: str | Path) -> None:
        """Write the evidence into a model's folder."""
        with open_output(Path(folder) / EVIDENCE) as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, indent=1, ensure_ascii=False)
            file.write("\n")

    @classmethod
    @contextmanager
    def changing(cls, folder: str | Path) -> Iterator[Evidence]:
        """Load the evidence in a model's folder, and save it after changes, locked against other processes."""
        refuse_links(Path(folder) / EVIDENCE, Path(folder) / TRANSLATIONS)
        with locked_file(Path(folder) / EVIDENCE):
            evidence = cls.load(folder)
            yield evidence
            evidence.save(folder)


def curve_of(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return loss, means of outputs and validation by step, a row for each step that logged any."""
    rows: dict[int, dict[str, Any]] = {}
    for entry in log:
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        values = {name: value for name, value in numbers.items() if LOGGED.fullmatch(name)}
        if values and "step" in entry:
            rows.setdefault(int(entry["step"]), {"step": int(entry["step"])}).update(values)
    return [rows[step] for step in sorted(rows)]


def differences(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe that are not the default, and always languages, data, preset, steps, seed."""
    always = {"type", "preset", "train", "validation", "source_lang", "target_lang", "seed", "max_steps"}
    defaults = {**Recipe().to_dict(), "training": TRAINING_DEFAULTS}
    changed: dict[str, Any] = {}
    for section, values in settings.items():
        own = {name: value for name, value in values.items() if name in always or value != defaults[section].get(name)}
        changed |= {section: own} if own else {}
    return changed


def without_private(value: Any) -> Any:
    """Return `value` of a recipe for publication: without secrets, private fields and folders of this machine."""
    value = masked(value)
    if isinstance(value, Mapping):
        return {name: without_private(item) for name, item in value.items() if name not in PRIVATE}
    if isinstance(value, (list, tuple)):
        return [without_private(item) for item in value]
    if not isinstance(value, str):
        return value
    name = hide_folders(value)  # as a whole, since names may contain blanks
    return name if name != value else PARTS.sub(lambda part: hide_folders(part[0]), value)


def hide_folders(text: str) -> str:
    """Return only the file name of a path that, once `..` is resolved, starts outside of the working folder."""
    path = os.path.normpath(text)
    first = path.split("/")[0]
    leads_out = "/" in text and text.strip("/ ") and (first in ("", "..") or first.startswith("~"))
    return os.path.basename(path) if leads_out else text


def versions() -> dict[str, str]:
    """Return the versions of Python, this library and those on which figures depend."""
    libraries = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    installed = {name: version(name) for name in libraries}
    return {"python": platform.python_version(), "recnmt-hf": __version__, **installed}


def hardware(device: torch.device) -> str:
    """Describe the hardware."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    cpus, threads = Path("/proc/cpuinfo"), torch.get_num_threads()
    name = re.search(r"(?m)^model name\s*:\s*(.+)$", cpus.read_text(encoding="utf-8")) if cpus.is_file() else None
    return f"CPU ({name[1] if name else platform.machine()}, {threads} thread{'s' * (threads > 1)})"


def sum_of_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 sum of sentences, one per line, in UTF-8."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
