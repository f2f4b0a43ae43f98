"""Test sets by their names in sacrebleu, such as wmt14."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError, short_repr
from .text import first_line


def files_of_test_set(name: str, pairs: Sequence[str], download: bool = True) -> list[str]:
    """
    Return the files of a test set for the first of the language pairs (such as `en-de`) that it has, the source first,
    then the references. They are those of sacrebleu's own folder (`SACREBLEU`, by default `~/.sacrebleu`), where it
    downloads a missing test set; without `download` only the names are checked. `UserError` if there is no such test
    set or pair (`sacrebleu --list` prints all names), or the download fails.
    """
    from sacrebleu.dataset import DATASETS
    from sacrebleu.utils import SACREBLEU_DIR

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise UserError(
            f"sacrebleu={short_repr(name)} is not a test set of sacrebleu, like {', '.join(near)}. sacrebleu --list "
            "prints all.",
            field="sacrebleu",
        )
    dataset = DATASETS[name]
    pair = next((pair for pair in pairs if pair in dataset.langpairs), None)
    if pair is None:
        known = ", ".join(sorted(dataset.langpairs))
        raise UserError(
            f"pair={short_repr(pairs[0])} is not a language pair of {name}. Use one of {known}.", field="pair"
        )
    if not download:
        return []
    try:
        files = [dataset.get_source_file(pair), *dataset.get_reference_files(pair)]
        for file in files:
            Path(file).stat()
    except (Exception, SystemExit) as error:  # sacrebleu ends the process after some failures
        raise UserError(
            f"sacrebleu={name} cannot be downloaded ({first_line(error)}). Run sacrebleu -t {name} -l "
            f"{pair} --echo src where there is a connection, and copy its folder ~/.sacrebleu to {SACREBLEU_DIR}, or "
            "name files in source and target.",
            field="sacrebleu",
        ) from error
    return files
