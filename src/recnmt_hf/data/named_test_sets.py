"""Test sets by their names in sacrebleu, such as wmt14."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError


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
        raise UserError("test_set.unknown", field="sacrebleu", value=name, near=", ".join(near))
    dataset = DATASETS[name]
    pair = next((pair for pair in pairs if pair in dataset.langpairs), None)
    if pair is None:
        known = ", ".join(sorted(dataset.langpairs))
        raise UserError("test_set.pair", field="pair", value=pairs[0], name=name, pairs=known)
    if not download:
        return []
    try:
        files = [dataset.get_source_file(pair), *dataset.get_reference_files(pair)]
        if missing := [file for file in files if not Path(file).is_file()]:
            raise FileNotFoundError(f"{missing[0]} is missing")
    except (Exception, SystemExit) as error:  # sacrebleu ends the process after some failures
        details = {"folder": SACREBLEU_DIR, "pair": pair, "reason": str(error) or type(error).__name__}
        raise UserError("test_set.not_downloaded", field="sacrebleu", value=name, **details) from error
    return files
