"""Model card of a trained model: a Jinja template filled from the evidence of its run and tests."""

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
from ..families import FAMILIES, PaperFigure
from ..models.seq2seq_loading import CARD, usage
from ..models.user_errors import UserError
from ..training.evidence import Evidence, TestScore
from ..training.metrics import VALIDATION_METRICS
from .checked_copy import model_folder, write_checked_copy


SOURCE = "https://github.com/recnmt-hf/recnmt_hf"
TEMPLATE = Path(__file__).with_name("card_template.md")
# Rows in the table of a learning curve.
MAX_ROWS = 12
METRIC_NAMES = {"bleu": "BLEU", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
# task -> words of the template
WORDS = {
    "translation": {"item": "sentence", "activity": "translating"},
    "summarization": {"item": "text", "activity": "saying"},
}
# Runs before the code of a card, which must work where recnmt_hf is not installed.
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
    r"|CONDA_PREFIX|RECNMT_FAST_PATHS|(OMP|MKL|KMP|OPENBLAS|CUDA)_\w+|SYSTEMROOT"
)
# Seconds after which the code of a card is stopped.
TIME_LIMIT = 600


def card_of(
    folder: str | Path,
    name: str,
    license: str | None = None,
    sentence: str | None = None,
    notes: str | None = None,
    template: str | Path | None = None,
) -> ModelCard:
    """
    Return the card of a trained model. The model is checked and copied first, and the code of the card is run on the
    copy; the card shows its output.

    Args:
        folder (`str` or `Path`): Folder of a run or a model. Its `evidence.json` is used if it exists.
        name (`str`): Model id or folder in the code of the card.
        license (`str`, *optional*): Licence identifier of the Hub, e.g. `"apache-2.0"`.
        sentence (`str`, *optional*): Sentence that the code translates; by default an example of the run.
        notes (`str`, *optional*): Markdown that follows the scores.
        template (`str` or `Path`, *optional*): A Jinja template in place of `card_template.md`. It gets `card_data`
            (the metadata as YAML), `evidence`, and the values of [`template_values`].

    Raises:
        UserError: The folder has no model, or one that cannot translate; the code of the card or the template fails.
    """
    folder = model_folder(folder)
    with tempfile.TemporaryDirectory() as copy:
        write_checked_copy(folder, Path(copy))
        return card_of_copy(Path(copy), Evidence.load(folder), name, license, sentence, notes, template)


def card_of_copy(
    copy: Path,
    evidence: Evidence,
    name: str,
    license: str | None = None,
    sentence: str | None = None,
    notes: str | None = None,
    template: str | Path | None = None,
) -> ModelCard:
    """Return the card of a model in a folder that [`write_checked_copy`] wrote, whose code is trusted."""
    config = AutoConfig.from_pretrained(copy, trust_remote_code=False)
    is_joint = not (copy / TARGET_TOKENIZER).is_dir()
    sentence = sentence or evidence.example or "..."
    printed = run_isolated(usage(str(copy.resolve()), is_joint, sentence))
    title = name.rpartition("/")[2] or name
    values = {
        "title": title,
        "name": name,
        "source": SOURCE,
        "code": usage(name, is_joint, sentence),
        "printed": printed,
        "quoted_sentence": "'" + sentence.replace("'", "'\\''") + "'",
        "notes": (notes or "").strip(),
        **template_values(config, evidence),
    }
    return fill_template(card_data(config, evidence, title, license), values, Path(template or TEMPLATE))


def fill_template(data: ModelCardData, values: Mapping[str, Any], template: Path) -> ModelCard:
    """Return the card that a Jinja template makes of the metadata and values."""
    from jinja2 import TemplateError  # slow to load

    try:
        return ModelCard.from_template(data, template_str=template.read_text(encoding="utf-8"), **values)
    except (OSError, TemplateError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"The card template {template} failed ({reason}). Remedy: correct it; {TEMPLATE} is the default template."
        ) from error


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
        UserError: It fails, or takes longer than [`TIME_LIMIT`].
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
                timeout=TIME_LIMIT,
            )
        except subprocess.TimeoutExpired as error:
            raise failed_usage(f"it takes longer than {TIME_LIMIT} seconds") from error
    if result.returncode != 0:
        raise failed_usage(result.stderr.strip().rpartition("\n")[2])
    return result.stdout.strip()


def failed_usage(reason: str) -> UserError:
    return UserError(
        f"The code of the card fails ({reason[:300].rstrip('.')}). Remedy: check that the folder has a complete model "
        "with its tokenizers, as written by training or save_pretrained."
    )


def task_of(evidence: Evidence) -> str:
    """Return `"summarization"` if one language was evaluated with ROUGE, `"translation"` otherwise."""
    measures = [kind for test in evidence.tests for kind in test.scores]
    shortens = len(set(evidence.languages)) == 1 and any(kind.startswith("rouge") for kind in measures)
    return "summarization" if shortens else "translation"


def language_name(code: str) -> str:
    """Return `"German"` for `"de"` or `"de-AT"`, and an unknown code unchanged."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # slow to load

    return LANGUAGES.get(code.replace("_", "-").partition("-")[0].lower(), "").title() or code


def describe_decoding(test: TestScore) -> str:
    """Return the decoding options of a test in words."""
    options = dict(test.decoding)
    beams, kind, alpha = (options.pop(name, None) for name in ("beams", "length_penalty_type", "length_penalty"))
    formula = "((5 + length) / 6)" if kind == "vaswani" else "length"
    penalty = f", log-probability divided by {formula}^{alpha}" if alpha else ""
    rest = "".join(f", {name}={value}" for name, value in options.items())
    return f"Beam {beams}{penalty}{rest}"


def template_values(config: Any, evidence: Evidence) -> dict[str, Any]:
    """Return the values of the template that follow from configuration and evidence."""
    tests, training, tokenizer = evidence.tests, evidence.training, evidence.tokenizer
    task, family = task_of(evidence), FAMILIES.get(config.model_type)
    symbols = {tokenizer["source_symbols"], tokenizer["target_symbols"]} if tokenizer else set()
    processes = training.get("processes", 1)
    # transformers' own models do not declare which sides have positions.
    has_limit = "source" in getattr(config, "sides_with_positions", ("source",))
    return {
        "evidence": evidence,
        "family": family.prefix if family else config.model_type,
        "languages": [language_name(code) for code in evidence.languages],
        "task": task,
        **WORDS[task],
        "score_table": score_table(tests) if tests else "",
        "signatures": list(dict.fromkeys(test.signature for test in tests)),
        "decodings": list(dict.fromkeys(describe_decoding(test) for test in tests)),
        "significance_tests": list(dict.fromkeys(test.test for test in tests if test.test)),
        "paper": family.paper if family else "",
        "citation": family.citation.strip() if family else "",
        "paper_table": paper_table(family.figures, evidence) if family else "",
        "symbols": [f"{count:,}" for count in sorted(symbols)],
        "duration": duration(training.get("seconds") or 0),
        "processes": f"{processes} times " if processes > 1 else "",
        "curve_table": curve_table(evidence.curve),
        "versions": ", ".join(f"{name} {number}" for name, number in evidence.versions.items()),
        "recipe": yaml.safe_dump(evidence.recipe, sort_keys=False, allow_unicode=True, width=110).strip(),
        "max_source_length": getattr(config, "max_position_embeddings", None) if has_limit else None,
    }


def score_table(tests: Sequence[TestScore]) -> str:
    """Return the table of scores, with baselines and p-values if there are any."""
    kinds = list(dict.fromkeys(kind for test in tests for kind in test.scores))
    compared = any(test.baseline for test in tests)
    heads = ["test set", "sentences", *(METRIC_NAMES.get(kind, kind) for kind in kinds)]
    rows = [heads + (["baseline", "p"] if compared else [])]
    for test in tests:
        row = [test.name, f"{test.sentences:,}", *(number(test.scores.get(kind)) for kind in kinds)]
        if compared:
            scores = " / ".join(number(test.baseline_scores.get(kind)) for kind in kinds)
            row += [f"{scores} ({test.baseline})" if test.baseline else "", number(test.p_value, 3)]
        rows.append(row)
    return markdown_table(rows)


def paper_table(figures: Sequence[PaperFigure], evidence: Evidence) -> str:
    """Return the paper's figures, only those of the model's languages if there are any, without empty columns."""
    figures = [figure for figure in figures if list(figure.languages) == evidence.languages] or figures
    rows = [["task", "size", "metric", "baseline", "the paper's", "this model"]]
    for figure in figures:
        own = " / ".join(f"{t.name} {number(next(iter(t.scores.values()), None))}" for t in evidence.tests)
        comparable = list(figure.languages) == evidence.languages and evidence.model.get("preset") == figure.size
        rows.append([figure.task, figure.size, figure.metric, figure.baseline, figure.model, own if comparable else ""])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return markdown_table(list(zip(*columns, strict=True)))


def duration(seconds: float) -> str:
    """Return a time such as `"45 s"`, `"12 min"` or `"3.5 h"`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def curve_table(curve: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of at most [`MAX_ROWS`] evaluations, evenly spread, including the last one."""
    evaluated = [row for row in curve if "eval_loss" in row]
    if not evaluated:
        return ""
    logged = {name for row in evaluated for name in row}
    names = [f"eval_{name}" for name in VALIDATION_METRICS if f"eval_{name}" in logged]
    count = min(MAX_ROWS, len(evaluated))
    chosen = sorted({round(k * (len(evaluated) - 1) / max(count - 1, 1)) for k in range(count)} | {len(evaluated) - 1})
    heads = ["step", *(f"validation {METRIC_NAMES.get(n[5:], n[5:])}" for n in names)]
    rows = [
        [f"{evaluated[k]['step']:,}", *(number(evaluated[k].get(n), 3 if n == "eval_loss" else 2) for n in names)]
        for k in chosen
    ]
    return markdown_table([heads, *rows])


def card_data(config: Any, evidence: Evidence, title: str, license: str | None) -> ModelCardData:
    """Return the metadata of the card for the Hub."""
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
            metric_args={"signature": test.signature, "decoding": describe_decoding(test)},
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
    """Return a Markdown table; the first row is the header."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
