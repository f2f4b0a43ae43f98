"""Tables of hand-written cards, made from files with the results of runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from .card import markdown_table, number


# In a card: `<!-- evidence: NAME -->`, the table, `<!-- end -->`. The folder `evidence` beside it contains NAME.json.
_PLACE = re.compile(r"(<!-- evidence: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDER = "evidence"


def table_of_sweep(results: list[dict[str, Any]]) -> str:
    """
    Return the table of a `sweep.json` as `recnmt sweep` writes it: a row for each run, with parameters, validation
    loss, and for each test set the score and the p-value against the first run.
    """
    names = list(dict.fromkeys(name for run in results for name in run["values"]))
    tests = list(dict.fromkeys(name for run in results for name in run["scores"]))
    has_seeds = len({run["seed"] for run in results}) > 1
    heads = [*names, *(["seed"] if has_seeds else []), "parameters", "loss"]
    for test in tests:
        heads += [test, "p"]
    rows = [heads]
    for run in results:
        row = [str(run["values"].get(name, "")) for name in names] + ([str(run["seed"])] if has_seeds else [])
        row += [f"{run['parameters'] / 1e6:.2f}M", number(run["validation"].get("loss"), 3)]
        for test in tests:
            scores = " / ".join(number(score) for score in run["scores"].get(test, {}).values())
            row += [scores, format_p(run["p_values"].get(test))]
        rows.append(row)
    return markdown_table(rows)


def format_p(value: float | None) -> str:
    """Return a p-value with the digits that a thousand resamplings give."""
    return "" if value is None else "< .01" if value < 0.01 else f"{value:.2f}".removeprefix("0")


def table_of(path: Path) -> str:
    """
    Return the table of a file: results of `recnmt sweep`, or a list of rows, the first of which is the header.

    Raises:
        UserError: The file is missing, or contains something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list) and content and isinstance(content[0], list):
            return markdown_table([[str(cell) for cell in row] for row in content])
        return table_of_sweep(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("card.table", field=str(path), reason=error) from error


def with_tables(card: Path) -> str:
    """Return the text of a card, with its tables regenerated from their files."""
    text = card.read_text(encoding="utf-8")

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{table_of(card.parent / FOLDER / f'{match[2]}.json')}\n{match[3]}"

    return _PLACE.sub(fill, text)
