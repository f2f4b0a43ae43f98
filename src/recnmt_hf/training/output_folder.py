"""The output folder of a run: names of its files, the lock, and what a run may delete."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._loading_errors import FINAL as FINAL
from .._loading_errors import read_small_text
from ..data.files import PREFIX, lock, remove, remove_abandoned
from ..data.tokenizer_pair import TARGET_TOKENIZER
from ..data.tree_inputs import RELATIONS_FILE
from ..errors import ExistingFileError
from .checkpoints import MANIFEST, discard, numbered_in
from .processes import logger
from .recipe import SECTIONS
from .recipe_yaml import load_yaml


# Prepared data.
DATA = "data"
SOURCE_TOKENIZER = "tokenizer"
PARTIAL_TOKENIZERS = "tokenizers.partial"
# Files and folders of the tokenizers, in the order in which they are written.
TOKENIZER_FILES = (RELATIONS_FILE, TARGET_TOKENIZER, SOURCE_TOKENIZER)
RECIPE = "recipe.yaml"
RECORD = "run.json"
RESULTS = "results.json"
# Folder of the first of two stages, with the checkpoints of its baseline.
BASELINE = "baseline"
LOCK = ".lock"
# Folder of a run that is overwritten, until the new one trains.
ASIDE = ".overwritten"
# A final model that is not complete, and in old versions the one that it replaces.
PARTIAL_FINAL, OLD_FINAL = f"{FINAL}.partial", f"{FINAL}.old"
# Seconds that the processes of a killed run may need to end.
LOCK_PATIENCE = 3.0

# Names that runs give to files and folders, except to prepared data and the lock.
_FIXED = (FINAL, PARTIAL_FINAL, OLD_FINAL, RECIPE, RECORD, RESULTS, PARTIAL_TOKENIZERS, *TOKENIZER_FILES, "runs")
_OF_RUNS = re.compile(rf"checkpoint-\d+|{FINAL}-[\w.-]+\.\w+|\..+\.partial|{'|'.join(map(re.escape, _FIXED))}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other runs from a folder, which exists meanwhile. Reading stays possible."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder / LOCK, LOCK_PATIENCE, folder) as unsupported:
            if unsupported is not None:
                remedy = f"Make sure that no other run writes into {folder}."
                logger.info(f"{folder / LOCK} cannot be locked ({unsupported.strerror}). {remedy}")
            yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def mapping_in(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file; empty if there is none that can be read."""
    if not path.is_file():  # reading a pipe would block
        return {}
    try:
        content = load_yaml(read_small_text(path), str(path))  # JSON is YAML
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def claim_output(output_dir: Path, resume: bool, overwrite: bool) -> bool:
    """
    Make sure that a run may write into its folder, and return whether the folder has no run, or none any more.
    `ExistingFileError` for an earlier run that is neither resumed nor overwritten, and for files of other programs: a
    run has a recipe with all sections, or a checkpoint with a manifest. Names alone prove nothing.
    """
    if not (output_dir / RECIPE).exists():  # a kill came between two runs
        bring_back(output_dir)
    names, overwrite = [path.name for path in files_in(output_dir)], overwrite and not resume
    if not names:
        return True
    is_run = set(SECTIONS) <= mapping_in(output_dir / RECIPE).keys() or any(
        [*output_dir.glob(f"{BASELINE}/checkpoint-*/{MANIFEST}"), *output_dir.glob(f"checkpoint-*/{MANIFEST}")]
    )
    foreign = [path.name for path in files_in(output_dir) if overwrite and not is_of_run(path)]
    some = ", ".join((foreign or names)[:4])
    if not resume and not overwrite:
        remedy = "Use another folder, --resume, or --overwrite (deletes the run)."
        raise ExistingFileError(f"{output_dir} is not empty ({some}). {remedy}", field=output_dir)
    if not is_run or foreign:
        reason = "contains files that recnmt did not create" if foreign else "is not a training run"
        raise ExistingFileError(f"{output_dir} {reason} ({some}); nothing was deleted.", field=output_dir)
    if overwrite:
        set_aside(output_dir)
    return overwrite


def files_in(output_dir: Path) -> list[Path]:
    """Return the content of an output folder, the recipe first, without data, locks and a run that is set aside."""
    paths = [path for path in output_dir.iterdir() if path.name not in (DATA, LOCK, ASIDE)]
    return sorted((path for path in paths if not path.name.startswith(PREFIX)), key=lambda path: path.name != RECIPE)


def is_of_run(path: Path) -> bool:
    """Return whether a path has a name that runs give; a baseline's folder has nothing else than its checkpoints."""
    return all(map(is_of_run, path.iterdir())) if path.name == BASELINE else bool(_OF_RUNS.fullmatch(path.name))


def set_aside(output_dir: Path) -> None:
    """Move an earlier run into a hidden folder, from which it returns if the new one fails before training."""
    aside = output_dir / ASIDE
    if aside.is_dir():  # the present one was to overwrite it, and was killed before it trained
        delete_run(output_dir)
        return
    aside.mkdir()
    for path in files_in(output_dir):  # without its recipe the run is brought back after a kill
        os.replace(path, aside / path.name)


def bring_back(output_dir: Path) -> None:
    """Move a run that was set aside back into its folder."""
    aside = output_dir / ASIDE
    if aside.is_dir():
        for path in reversed(files_in(aside)):
            os.replace(path, output_dir / path.name)
        remove(aside)


def delete_run(output_dir: Path) -> None:
    """Delete the files of a run that has not trained. The recipe is last, so that a killed deletion can be repeated."""
    for path in reversed(files_in(output_dir)):
        if is_of_run(path):
            remove(path)


def remove_leftovers(output_dir: Path) -> None:
    """Delete incomplete files of a killed run."""
    for _, folder in (*numbered_in(output_dir), *numbered_in(output_dir / BASELINE)):
        if not (folder / MANIFEST).exists():
            discard(folder)
    for name in (PARTIAL_FINAL, OLD_FINAL, PARTIAL_TOKENIZERS):
        remove(output_dir / name)
    for place in (output_dir, output_dir / DATA):
        remove_abandoned(place)
