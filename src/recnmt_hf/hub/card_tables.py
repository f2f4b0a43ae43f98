"""Tables of hand-written cards, made from the files of the runs that they tell of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..models.user_errors import UserError
from .card import markdown_table, number


# In a card: `<!-- evidence: NAME -->`, the table, `<!-- end -->`; NAME.json stands in the folder `evidence` beside it.
_PLACE = re.compile(r"(<!-- evidence: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDER = "evidence"


def table_of_sweep(results: list[dict[str, Any]]) -> str:
    """
    The table of a `sweep.json` as `recnmt sweep` writes it: a row for each run, with its parameters, its validation
    loss, and for each test set score and p-value against the first run.
    """
    names = list(dict.fromkeys(name for each in results for name in each["values"]))
    tests = list(dict.fromkeys(name for each in results for name in each["scores"]))
    seeded = len({each["seed"] for each in results}) > 1
    heads = [*names, *(["seed"] if seeded else []), "parameters", "loss"]
    for test in tests:
        heads += [test, "p"]
    rows = [heads]
    for each in results:
        row = [str(each["values"].get(name, "")) for name in names] + ([str(each["seed"])] if seeded else [])
        row += [f"{each['parameters'] / 1e6:.2f}M", number(each["validation"].get("loss"), 3)]
        for test in tests:
            scores = each["scores"].get(test, {})
            p_value = each["p_values"].get(test)
            row += [" / ".join(number(score) for score in scores.values()), shown_p(p_value)]
        rows.append(row)
    return markdown_table(rows)


def shown_p(value: float | None) -> str:
    """A p-value with the digits that a thousand resamplings give."""
    return "" if value is None else "< .01" if value < 0.01 else f"{value:.2f}".removeprefix("0")


def table_of_rows(rows: list[list[Any]]) -> str:
    """A table as it stands in a file: lists of cells, the first of which are the heads."""
    return markdown_table([[str(cell) for cell in row] for row in rows])


def table_of(path: Path) -> str:
    """
    The table of a file: what `recnmt sweep` or `recnmt logic` wrote, or a list of rows.

    Raises:
        UserError: The file is missing, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list) and content and isinstance(content[0], list):
            return table_of_rows(content)
        return table_of_sweep(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no table ({error}). Remedy: give a sweep.json, or a list of rows.") from error


def with_tables(card: Path) -> str:
    """The text of a card with its tables made anew from their files."""
    text = card.read_text(encoding="utf-8")

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}{table_of(card.parent / FOLDER / f'{found[2]}.json')}\n{found[3]}"

    return _PLACE.sub(fill, text)
