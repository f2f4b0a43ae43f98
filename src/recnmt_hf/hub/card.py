"""The card of a trained model, made from its evidence: use, scores, training, limits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig

from ..data.files import open_output
from ..data.tokenizer_pair import TARGET_TOKENIZER
from ..families import FAMILIES
from ..models.seq2seq_card import CARD, usage
from ..models.user_errors import UserError
from ..training.evidence import Evidence, TestScore
from ..training.metrics import VALIDATION_METRICS
from .checked_copy import model_folder, write_checked_copy


SOURCE = "https://github.com/recnmt-hf/recnmt_hf"
# Of a curve in a table.
MOST_ROWS = 12
METRIC_NAMES = {"bleu": "BLEU", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
# Of each task, what it takes and what it does.
WORDS = {"translation": ("sentence", "translating"), "summarization": ("text", "saying")}
# Put before the code of a card: it must run where recnmt_hf is not installed.
WITHOUT_PACKAGE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "recnmt_hf":
            raise ImportError("recnmt_hf is not installed here")
sys.meta_path.insert(0, Absent())
"""
# Environment variables that the code of a card inherits. Any other may contain a secret.
ENVIRONMENT = re.compile(
    r"PATH|HOME|TMPDIR|TEMP|TMP|LANG|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|DYLD_\w+|PYTHON(PATH|HOME|UTF8)|VIRTUAL_ENV"
    r"|CONDA_PREFIX|CC|RECNMT_FAST_PATHS|(OMP|MKL|KMP|OPENBLAS|CUDA)_\w+|SYSTEMROOT"
)
# Time limit in seconds.
PATIENCE = 600


def card_of(
    folder: str | Path,
    name: str,
    license: str | None = None,
    sentence: str | None = None,
    notes: str | None = None,
) -> ModelCard:
    """
    Return the card of a trained model. The model is checked and copied first, and the code of the card is run on the
    copy; the card shows what it prints.

    Args:
        folder (`str` or `Path`): A run's folder, or that of a model, with its evidence where there is some.
        name (`str`): What the model will be called: a model id, or a folder.
        license (`str`, *optional*): As the Hub names licences, e.g. `"apache-2.0"`.
        sentence (`str`, *optional*): Translated by the code in the card; by default one of the run's own.
        notes (`str`, *optional*): Markdown that follows the scores.

    Raises:
        UserError: The folder has no model, or one that cannot translate; or the code in the card fails.
    """
    folder = model_folder(folder)
    with tempfile.TemporaryDirectory() as copy:
        write_checked_copy(folder, Path(copy))
        return card_of_copy(Path(copy), Evidence.load(folder), name, license, sentence, notes)


def card_of_copy(
    copy: Path,
    evidence: Evidence,
    name: str,
    license: str | None = None,
    sentence: str | None = None,
    notes: str | None = None,
) -> ModelCard:
    """Return the card of a model in a folder that [`write_checked_copy`] wrote, whose code is trusted."""
    config = AutoConfig.from_pretrained(copy, trust_remote_code=False)
    is_joint = not (copy / TARGET_TOKENIZER).is_dir()
    sentence = sentence or evidence.example or "..."
    said = run_isolated(usage(str(copy.resolve()), is_joint, sentence))
    title = name.rpartition("/")[2] or name
    parts = [
        f"# {title}",
        introduction(config, evidence),
        f"```python\n{usage(name, is_joint, sentence)}\n```",
        f"It prints:\n\n```text\n{said}\n```",
        *package_usage(name, sentence),
        *scores_section(evidence),
        *([notes.strip()] if notes and notes.strip() else []),
        *paper_section(config.model_type, evidence),
        *training_section(evidence),
        *limits_section(config, evidence),
        *citation_section(config.model_type),
    ]
    data = card_data(config, evidence, title, license)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def write_card(folder: str | Path, name: str | None = None, **options: Any) -> Path:
    """
    Write [`card_of`] into a model's folder, replacing an earlier card.

    Args:
        folder (`str` or `Path`): A run's folder, or that of a model.
        name (`str`, *optional*): As for [`card_of`]; by default the model's folder.
        **options: Those of [`card_of`].

    Returns:
        The card's path.

    Raises:
        UserError: As for [`card_of`], or `README.md` is a symbolic link, which may lead to any file of this machine.
    """
    folder = model_folder(folder)
    path = folder / CARD
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, and its target is not overwritten. Remedy: delete the link.")
    card = card_of(folder, name or str(folder), **options)
    with open_output(path) as file:
        file.write(card.content)
    return path


def run_isolated(code: str) -> str:
    """
    Run Python code in a separate process and return its output. The process is offline and gets an empty HF_HOME and
    few environment variables, so it has no access tokens at hand. It is not a sandbox for hostile code.

    Raises:
        UserError: It fails, or takes longer than [`PATIENCE`].
    """
    kept = {name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name)}
    with tempfile.TemporaryDirectory() as home:
        try:
            result = subprocess.run(
                [sys.executable, "-P", "-"],  # -P: the working folder's modules are not imported
                input=WITHOUT_PACKAGE + code,
                capture_output=True,
                encoding="utf-8",
                env={**kept, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
                cwd=home,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired as error:
            raise failed_usage(f"it takes longer than {PATIENCE} seconds") from error
    if result.returncode != 0:
        raise failed_usage(result.stderr.strip().rpartition("\n")[2])
    return result.stdout.strip()


def failed_usage(reason: str) -> UserError:
    return UserError(
        f"The code that the card would show fails ({reason[:300].rstrip('.')}). Remedy: see that the folder holds a "
        "whole model with its tokenizers, as training and save_pretrained write them."
    )


def task_of(evidence: Evidence) -> str:
    """`"translation"`, or `"summarization"` where shorter texts of one language are what it was measured by."""
    measures = [kind for test in evidence.tests for kind in test.scores]
    shortens = len(set(evidence.languages)) == 1 and any(kind.startswith("rouge") for kind in measures)
    return "summarization" if shortens else "translation"


def language_name(code: str) -> str:
    """`"German"` for `"de"` or `"de-AT"`; a code that is not known, as it is."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # slow to load

    return LANGUAGES.get(code.replace("_", "-").partition("-")[0].lower(), "").title() or code


def introduction(config: Any, evidence: Evidence) -> str:
    family = FAMILIES.get(config.model_type)
    prefix = family.prefix if family else config.model_type
    names = [language_name(code) for code in evidence.languages]
    if task_of(evidence) == "summarization":
        does = f"Summarizes texts in {names[0]}"
    else:
        does = f"Translates {' to '.join(names) or 'between the languages of its training'}"
    parameters = evidence.model.get("parameters")
    size = f", {parameters / 1e6:.1f}M parameters" if parameters else ""
    return (
        f"{does}: {prefix} of [recnmt_hf]({SOURCE})"
        f"{size}. It needs transformers 5.15 or newer and nothing else; its code comes along."
    )


def package_usage(name: str, sentence: str) -> list[str]:
    return [
        f"With [recnmt_hf]({SOURCE}) installed there are batches by tokens, n-best lists, Vaswani's length penalty, "
        "scores and alignments:",
        f"```bash\necho {shell_quoted(sentence)} | recnmt translate {name}\n```",
    ]


def shell_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def scores_section(evidence: Evidence) -> list[str]:
    """A table of the scores, and what they depend on."""
    if not evidence.tests:
        return ["## Scores", "None have been measured."]
    kinds = list(dict.fromkeys(kind for test in evidence.tests for kind in test.scores))
    compared = any(test.baseline for test in evidence.tests)
    heads = ["test set", "sentences", *(METRIC_NAMES.get(kind, kind) for kind in kinds)]
    rows = [heads + (["baseline", "p"] if compared else [])]
    for test in evidence.tests:
        row = [test.name, f"{test.sentences:,}", *(number(test.scores.get(kind)) for kind in kinds)]
        if compared:
            before = " / ".join(number(test.baseline_scores.get(kind)) for kind in kinds)
            row += [f"{before} ({test.baseline})" if test.baseline else "", number(test.p_value, 3)]
        rows.append(row)
    averaged = evidence.training.get("averaged") or []
    made = f" The model is the average of {len(averaged)} checkpoints." if len(averaged) > 1 else ""
    ways = list(dict.fromkeys(decoding_in_words(test) for test in evidence.tests))
    tests = list(dict.fromkeys(test.test for test in evidence.tests if test.test))
    lines = [
        f"Signature{'s' * (len({test.signature for test in evidence.tests}) > 1)}: "
        + ", ".join(f"`{each}`" for each in dict.fromkeys(test.signature for test in evidence.tests))
        + f". {'; '.join(ways)}.{made}"
        + (f" p: {', '.join(tests)}." if tests else ""),
        "The translations are in `translations/`; `evidence.json` has the SHA-256 sums of sources and references, one "
        "sentence a line.",
    ]
    return ["## Scores", markdown_table(rows), *lines]


def decoding_in_words(test: TestScore) -> str:
    options = dict(test.decoding)
    beams, kind, alpha = (options.pop(name, None) for name in ("beams", "length_penalty_type", "length_penalty"))
    formula = "((5 + length) / 6)" if kind == "vaswani" else "length"
    penalty = f", log-probability divided by {formula}^{alpha}" if alpha else ""
    rest = "".join(f", {name}={value}" for name, value in options.items())
    return f"Beam {beams}{penalty}{rest}"


def paper_section(model_type: str, evidence: Evidence) -> list[str]:
    """The paper's figures, for these languages where it has some."""
    if model_type not in FAMILIES:
        return []
    paper, figures = FAMILIES[model_type].paper, FAMILIES[model_type].figures
    same = [figure for figure in figures if list(figure.languages) == evidence.languages] or list(figures)
    rows = [["task", "size", "metric", "baseline", "the paper's", "this model"]]
    for figure in same:
        own = " / ".join(f"{t.name} {number(next(iter(t.scores.values()), None))}" for t in evidence.tests)
        comparable = list(figure.languages) == evidence.languages and evidence.model.get("preset") == figure.size
        rows.append([figure.task, figure.size, figure.metric, figure.baseline, figure.model, own if comparable else ""])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    rows = [list(row) for row in zip(*columns, strict=True)]
    note = "Only the same test set, with the same measure, compares with it."
    return ["## What the paper reports", f"{paper}. {note}", markdown_table(rows)]


def training_section(evidence: Evidence) -> list[str]:
    if not evidence.training:
        return []
    about = evidence.training
    item, _ = WORDS[task_of(evidence)]
    lines = []
    data, tokenizer = evidence.data, evidence.tokenizer
    if data:
        lines.append(f"{data['training_pairs']:,} {item} pairs, {data['validation_pairs']:,} for validation.")
    if tokenizer:
        symbols = {tokenizer["source_symbols"], tokenizer["target_symbols"]}
        shared = "one vocabulary" if tokenizer["joint"] else "a vocabulary for each side"
        lines.append(
            f"Tokenizer: {tokenizer['kind']}, {shared} ({' and '.join(f'{n:,}' for n in sorted(symbols))} symbols)."
        )
    if evidence.base_model:
        lines.append(f"It started from `{evidence.base_model}`.")
    seconds = about.get("seconds_per_step")
    took = f" of {seconds:.3g} s each (evaluation included)" if seconds else ""
    took += f", {duration(about['seconds'])} in all," if about.get("seconds") else ""
    processes = about.get("processes", 1)
    lines.append(
        f"{about['steps']:,} steps{took} on {f'{processes} times ' if processes > 1 else ''}{about['hardware']}, "
        f"seed {about['seed']}."
    )
    libraries = ", ".join(f"{name} {number}" for name, number in evidence.versions.items())
    parts = ["## Training", " ".join(lines), *curve_table(evidence.curve), f"Versions: {libraries}."]
    recipe = yaml.safe_dump(evidence.recipe, sort_keys=False, allow_unicode=True, width=110).strip()
    return [*parts, "The recipe, where it differs from the defaults:", f"```yaml\n{recipe}\n```"]


def duration(seconds: float) -> str:
    """`"45 s"`, `"12 min"`, `"3.5 h"`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def curve_table(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """The evaluations of a curve, at most twelve of them spread evenly, the last one in any case."""
    evaluated = [row for row in curve if "eval_loss" in row]
    if not evaluated:
        return []
    logged = {name for row in evaluated for name in row}
    names = [f"eval_{name}" for name in VALIDATION_METRICS if f"eval_{name}" in logged]
    count = min(MOST_ROWS, len(evaluated))
    chosen = sorted({round(k * (len(evaluated) - 1) / max(count - 1, 1)) for k in range(count)} | {len(evaluated) - 1})
    heads = ["step", *(f"validation {METRIC_NAMES.get(n[5:], n[5:])}" for n in names)]
    rows = [
        [f"{evaluated[k]['step']:,}", *(number(evaluated[k].get(n), 3 if n == "eval_loss" else 2) for n in names)]
        for k in chosen
    ]
    return [markdown_table([heads, *rows])]


def limits_section(config: Any, evidence: Evidence) -> list[str]:
    pairs = evidence.data.get("training_pairs")
    task = task_of(evidence)
    item, doing = WORDS[task]
    learnt = f"{pairs:,} {item} pairs" if pairs else "its training data"
    # transformers' own models do not say which sides have positions.
    limited = "source" in getattr(config, "sides_with_positions", ("source",))
    longest = getattr(config, "max_position_embeddings", None) if limited else None
    room = f" Sources are at most {longest:,} tokens long." if longest else ""
    return [
        "## Intended use and limits",
        f"Research on models of {task}. It knows what {learnt} say, one {item} at a time: other domains, other "
        f"registers, names and numbers go wrong more often, and nothing keeps it from {doing} fluently what the "
        f"source does not say.{room}",
    ]


def citation_section(model_type: str) -> list[str]:
    if model_type not in FAMILIES:
        return []
    return ["## Citation", f"- {FAMILIES[model_type].paper}."]


def card_data(config: Any, evidence: Evidence, title: str, license: str | None) -> ModelCardData:
    """The card's metadata, as the Hub reads them."""
    metrics = sorted({"rouge" if kind.startswith("rouge") else kind for t in evidence.tests for kind in t.scores})
    train = evidence.recipe.get("data", {}).get("train", [])
    task = task_of(evidence)
    results = [
        EvalResult(
            task_type=task,
            task_name=task.capitalize(),
            dataset_type=dataset_of(test.dataset) or test.name,
            dataset_name=test.name,
            dataset_args={"sentences": test.sentences, "reference_sha256": test.reference_sha256},
            metric_type="rouge" if kind.startswith("rouge") else kind,
            metric_name=METRIC_NAMES.get(kind, kind),
            metric_value=round(value, 4),
            metric_args={"signature": test.signature, "decoding": decoding_in_words(test)},
        )
        for test in evidence.tests
        for kind, value in test.scores.items()
    ]
    languages = [each.partition("-")[0].partition("_")[0] for each in evidence.languages]
    return ModelCardData(
        language=list(dict.fromkeys(languages)) or None,
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=[task, "recnmt_hf", config.model_type],
        datasets=hub_datasets(train) or None,
        metrics=metrics or None,
        base_model=evidence.base_model,
        model_name=title if results else None,
        eval_results=results or None,
    )


def hub_datasets(corpora: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[str]:
    corpora = [corpora] if isinstance(corpora, Mapping) else corpora
    names = [str(each["dataset"]) for each in corpora if each.get("dataset")]
    return list(dict.fromkeys(name for name in names if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)))


def dataset_of(corpora: Iterable[Mapping[str, Any]]) -> str | None:
    return next(iter(hub_datasets(corpora)), None)


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
