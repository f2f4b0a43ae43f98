"""Model card of a trained model: a Jinja template filled from the evidence of its run and tests."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig

from .._plain_card import CARD, usage
from ..data.files import open_output
from ..data.languages import main_language
from ..data.tokenizer_pair import TARGET_TOKENIZER
from ..data.tree_inputs import tree_options
from ..errors import UserError, shorten
from ..families import FAMILIES, PaperTable
from ..training.evidence import Evidence, TestScore, average_of, refuse_links
from ..training.metrics import VALIDATION_METRICS
from ..training.recipe import AVERAGE
from .checked_copy import model_folder, short_name, write_checked_copy


SOURCE = "https://github.com/recnmt-hf/recnmt_hf"
METRIC_NAMES = {"bleu": "BLEU", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
# Environment variables that the code of a card inherits. Any other may contain a secret.
ENVIRONMENT = re.compile(
    r"PATH|HOME|TMPDIR|TEMP|TMP|LANG|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|DYLD_\w+|PYTHON(PATH|HOME|UTF8)|VIRTUAL_ENV"
    r"|CONDA_PREFIX|RECNMT_FAST_PATHS|(OMP|MKL|KMP|OPENBLAS|CUDA)_\w+|SYSTEMROOT"
)
TIME_LIMIT = 600  # seconds after which the code of a card is stopped


def write_card(
    folder: str | Path,
    name: str | None = None,
    license: str | None = None,
    sentence: str | None = None,
    notes: str | None = None,
    template: str | Path | None = None,
) -> Path:
    """
    Write the card of a trained model into its folder, replacing an earlier one, and return its path. The model is
    checked and copied first, and the code of the card is run on the copy; the card shows its output.

    Args:
        folder (`str` or `Path`): Folder of a run or a model. Its `evidence.json` is used if it exists.
        name (`str`, *optional*): Model id or folder in the code of the card; by default the model's folder.
        license (`str`, *optional*): Licence identifier of the Hub, e.g. `"apache-2.0"`.
        sentence (`str`, *optional*): Sentence that the code translates; by default an example of the run.
        notes (`str`, *optional*): Markdown that follows the scores.
        template (`str` or `Path`, *optional*): A Jinja template in place of `card_template.md`. It gets `card_data`
            (the metadata as YAML), `evidence`, and the other values of that template.

    Raises:
        UserError: The folder has no model, or one that cannot translate; the code of the card fails; `README.md` is a
            symbolic link, which may lead to any file of this machine.
        jinja2.TemplateError: The template fails.
    """
    folder = model_folder(folder)
    path = folder / CARD
    refuse_links(path)
    with tempfile.TemporaryDirectory() as copy:
        write_checked_copy(folder, Path(copy))
        evidence = Evidence.load(folder)
        card = card_of_copy(Path(copy), evidence, name or str(folder), license, sentence, notes, template)
    with open_output(path) as file:
        file.write(card.content)
    return path


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
    from transformers.models.whisper.tokenization_whisper import LANGUAGES  # slow to load

    config = AutoConfig.from_pretrained(copy, trust_remote_code=False)
    is_joint = not (copy / TARGET_TOKENIZER).is_dir()
    sentence, title = sentence or evidence.example or "...", short_name(name)
    tests, training, tokenizer = evidence.tests, evidence.training, evidence.tokenizer
    task, family = task_of(evidence), FAMILIES.get(config.model_type)
    symbols = {tokenizer["source_symbols"], tokenizer["target_symbols"]} if tokenizer else set()
    processes = training.get("processes", 1)
    # transformers' own models do not declare which sides have positions.
    has_limit = "source" in getattr(config, "sides_with_positions", ("source",))
    values = {
        "title": title,
        "name": name,
        "source": SOURCE,
        "code": usage(name, is_joint, sentence),
        "printed": run_isolated(usage(str(copy.resolve()), is_joint, sentence)),
        "quoted_sentence": quote(sentence),
        "quoted_name": quote(name),
        "notes": (notes or "").strip(),
        "sentencepiece": any(copy.rglob("*.spm")),  # MarianMT's tokenizers
        "evidence": evidence,
        "family": family.prefix if family else config.model_type,
        "languages": [LANGUAGES.get(main_language(code), "").title() or code for code in evidence.languages],
        "task": task,
        "item": "text" if task == "summarization" else "sentence",
        "score_table": score_table(tests),
        "signatures": list(dict.fromkeys(test.signature for test in tests)),
        "decodings": list(dict.fromkeys(describe_decoding(test) for test in tests)),
        "significance_tests": list(dict.fromkeys(test.test for test in tests if test.test)),
        "paper": family.paper if family else "",
        "citation": family.citation.strip() if family else "",
        "paper_table": paper_table(family.tables, evidence) if family else "",
        "symbols": [f"{count:,}" for count in sorted(symbols)],
        "duration": duration(training.get("seconds") or 0),
        "processes": f"{processes} times " if processes > 1 else "",
        "curve_table": curve_table(evidence.curve),
        "versions": ", ".join(f"{name} {number}" for name, number in evidence.versions.items()),
        "recipe": yaml.safe_dump(evidence.recipe, sort_keys=False, allow_unicode=True, width=110).strip(),
        "reads_trees": tree_options(config) is not None,
        "max_source_length": getattr(config, "max_position_embeddings", None) if has_limit else None,
    }
    text = Path(template or Path(__file__).with_name("card_template.md")).read_text(encoding="utf-8")
    return ModelCard.from_template(card_data(config, evidence, title, license), template_str=text, **values)


def run_isolated(code: str) -> str:
    """Return the output of Python code in an offline process without access tokens; no sandbox for malicious code."""
    variables = {name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name)}
    with tempfile.TemporaryDirectory() as home:
        result = subprocess.run(
            [sys.executable, "-P", "-"],  # -P: the working folder's modules are not imported
            input=f'import sys\nsys.modules["recnmt_hf"] = None\n{code}',  # it must work without the package
            capture_output=True,
            encoding="utf-8",
            env={**variables, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
            cwd=home,
            timeout=TIME_LIMIT,
        )
    if result.returncode != 0:
        reason = shorten(result.stderr.strip().rpartition("\n")[2])
        raise UserError(f"The code of the card fails ({reason}).")
    return result.stdout.strip()


def task_of(evidence: Evidence) -> str:
    """Return `"summarization"` if one language was evaluated with ROUGE, `"translation"` otherwise."""
    is_rouge = any(kind.startswith("rouge") for test in evidence.tests for kind in test.scores)
    return "summarization" if is_rouge and len(set(evidence.languages)) == 1 else "translation"


def describe_decoding(test: TestScore) -> str:
    """Return the decoding options of a test in words."""
    options = dict(test.decoding)
    beams, kind, alpha = (options.pop(name, None) for name in ("beams", "length_penalty_type", "length_penalty"))
    formula = "((5 + length) / 6)" if kind == "vaswani" else "length"
    penalty = f", log-probability divided by {formula}^{alpha}" if alpha else ""
    rest = "".join(f", {name}={value}" for name, value in options.items())
    return f"Beam {beams}{penalty}{rest}"


def score_table(tests: Sequence[TestScore]) -> str:
    """Return the table of scores, with baselines and p-values if available."""
    kinds = {kind: METRIC_NAMES.get(kind, kind) for test in tests for kind in test.scores}
    baselines = [" / ".join(number(test.baseline_scores.get(kind)) for kind in kinds) for test in tests]
    rows = [
        {
            "test set": test.name if test.references == 1 else f"{test.name} ({test.references} references)",
            "sentences": f"{test.sentences:,}",
            **{name: number(test.scores.get(kind)) for kind, name in kinds.items()},
            "length ratio": number(test.length_ratio, 3),
            "baseline": f"{baseline} ({test.baseline})" if test.baseline else "",
            "p": number(test.p_value, 3),
        }
        for test, baseline in zip(tests, baselines, strict=True)
    ]
    if average := average_of(tests):
        rows.append({"test set": AVERAGE, **{name: number(average.get(kind)) for kind, name in kinds.items()}})
    return filled_table(rows)


def paper_table(tables: Sequence[PaperTable], evidence: Evidence) -> str:
    """Return the paper's comparisons, those of the model's languages if there are any."""
    tables = [table for table in tables if table.kind == "main"]
    tables = [table for table in tables if list(table.task.languages) == evidence.languages] or tables
    firsts = [(test, next(iter(test.scores), "")) for test in evidence.tests]
    own = " / ".join(f"{test.name} {number(test.scores.get(kind))}" for test, kind in firsts)
    gains = [(test.scores.get(kind), test.baseline_scores.get(kind)) for test, kind in firsts]
    own_differences = " / ".join(f"{new - old:+.2f}" for new, old in gains if new is not None and old is not None)
    rows = []
    for table in tables:
        scores, differences = table.texts(table.own.system)
        is_same = list(table.task.languages) == evidence.languages and evidence.model.get("preset") == table.size
        rows.append(
            {
                "task": f"{table.task.name} {' / '.join(table.task.tests)}",
                "size": table.size,
                "metric": table.task.metric,
                "baseline": "" if table.own is table.baseline else table.texts(table.baseline.system)[0],
                "the paper's": scores + (f" (p {table.own.p})" if table.own.p else ""),
                "difference": differences,
                "this model": own if is_same else "",
                "its difference": own_differences if is_same else "",
            }
        )
    return filled_table(rows)


def duration(seconds: float) -> str:
    """Return a time such as `"45 s"`, `"12 min"` or `"3.5 h"`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def curve_table(curve: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of at most 12 evaluations with means of outputs, evenly spread, including the last."""
    evaluated = [row for row in curve if "eval_loss" in row]
    means = sorted({name for row in evaluated for name in row if name.startswith("mean_")})
    last, count, rows = len(evaluated) - 1, min(12, len(evaluated)), []
    for row in (evaluated[round(k * last / max(count - 1, 1))] for k in range(count)):
        cells = {"step": f"{row['step']:,}"}
        for name in VALIDATION_METRICS:
            digits = 3 if name == "loss" else 2
            cells[f"validation {METRIC_NAMES.get(name, name)}"] = number(row.get(f"eval_{name}"), digits)
        rows.append(cells | {f"training {name.removeprefix('mean_')}": number(row.get(name), 3) for name in means})
    return filled_table(rows)


def card_data(config: Any, evidence: Evidence, title: str, license: str | None) -> ModelCardData:
    """Return the metadata of the card for the Hub."""
    metrics = sorted({"rouge" if kind.startswith("rouge") else kind for t in evidence.tests for kind in t.scores})
    train = evidence.recipe.get("data", {}).get("train", [])
    task = task_of(evidence)
    results = [
        EvalResult(
            task_type=task,
            task_name=task.capitalize(),
            dataset_type=next(iter(hub_datasets(test.dataset)), test.name),
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
    return ModelCardData(
        language=list(dict.fromkeys(map(main_language, evidence.languages))) or None,
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


def hub_datasets(corpora: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the data sets of the Hub among the corpora."""
    corpora = [corpora] if isinstance(corpora, Mapping) else corpora
    names = [str(corpus["dataset"]) for corpus in corpora if corpus.get("dataset")]
    return list(dict.fromkeys(name for name in names if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)))


def number(value: float | None, digits: int = 2) -> str:
    """Format a number; `None` gives empty text."""
    return "" if value is None else f"{value:.{digits}f}"


def filled_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a Markdown table of cells by header, without empty columns; empty without rows."""
    heads = [head for head in (rows[0] if rows else ()) if any(row.get(head) for row in rows)]
    return markdown_table([heads, *([row.get(head, "") for head in heads] for row in rows)]) if rows else ""


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is the header."""
    head, *body = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *body])
