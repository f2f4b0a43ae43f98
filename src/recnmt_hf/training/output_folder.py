"""The output folder of a run: names of its files, the lock, and what a run may delete."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._bounded_reading import read_small_text
from .._loading_errors import FINAL as FINAL
from ..data.files import PREFIX, lock, remove, remove_abandoned
from ..data.tokenizer_pair import TARGET_TOKENIZER
from ..data.tree_inputs import RELATIONS_FILE
from ..errors import ExistingFileError
from .checkpoints import MANIFEST, PARTIAL, discard, numbered_in
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
# Name of a final model while the next one replaces it.
REPLACED = f"{FINAL}.old"
# Seconds that the processes of a killed run may need to end.
LOCK_PATIENCE = 3.0

# Names that runs give to files and folders, except to checkpoints, prepared data and the lock.
_OF_RUNS = re.compile(
    rf"{FINAL}(\.partial|\.old|-[\w.-]+\.\w+)?|runs|\..+\.partial|"
    + "|".join(map(re.escape, (RECIPE, RECORD, RESULTS, PARTIAL_TOKENIZERS, *TOKENIZER_FILES)))
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other runs from a folder, which exists meanwhile. Reading stays possible."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder / LOCK, LOCK_PATIENCE, folder) as unsupported:
            if unsupported is not None:
                remedy = f"Make sure that no other run writes into {folder}."
                logger.info(f"{folder / LOCK} cannot be locked ({unsupported.strerror}). {remedy}")
            yield
    finally:
        if is_new:
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


def all_checkpoints_in(output_dir: Path) -> list[Path]:
    """Return the checkpoints of all stages, complete or not, in the order of training."""
    return [folder for place in (output_dir / BASELINE, output_dir) for _, folder in numbered_in(place)]


def claim_output(output_dir: Path, resume: bool, overwrite: bool) -> bool:
    """
    Make sure that a run may write into its folder, and return whether the folder has no run, or none any more.
    `ExistingFileError` for an earlier run that is neither resumed nor overwritten, and for files of other programs: a
    run has a recipe with all sections, or a checkpoint with a manifest. Names alone prove nothing.
    """
    if not (output_dir / RECIPE).exists():  # a kill came between two runs
        bring_back(output_dir)
    names = sorted(
        path.name
        for path in output_dir.iterdir()
        if path.name not in (DATA, LOCK, ASIDE) and not path.name.startswith(PREFIX)
    )
    some = ", ".join(names[:4])
    if not names:
        return True
    if not resume and not overwrite:
        raise ExistingFileError(
            f"{output_dir} is not empty ({some}). Use another folder, --resume, or --overwrite (deletes the run).",
            field=output_dir,
        )
    has_recipe = set(SECTIONS) <= mapping_in(output_dir / RECIPE).keys()
    if not has_recipe and not any((folder / MANIFEST).is_file() for folder in all_checkpoints_in(output_dir)):
        raise ExistingFileError(f"{output_dir} is not a training run ({some}); nothing was deleted.", field=output_dir)
    if resume:
        return False
    foreign = [name for name in names if not is_of_run(output_dir / name)]
    if foreign:
        some = ", ".join(foreign[:4])
        raise ExistingFileError(
            f"{output_dir} contains files that recnmt did not create ({some}); nothing was deleted.", field=output_dir
        )
    set_aside(output_dir)
    return True


def is_of_run(path: Path) -> bool:
    """Return whether a path has a name that runs give; a baseline's folder has nothing else than its checkpoints."""
    if path.name == BASELINE:
        return all(inner.name == "runs" or inner in all_checkpoints_in(path.parent) for inner in path.iterdir())
    return bool(_OF_RUNS.fullmatch(path.name)) or path in all_checkpoints_in(path.parent)


def set_aside(output_dir: Path) -> None:
    """Move an earlier run into a hidden folder, from which it returns if the new one fails before training."""
    if (output_dir / ASIDE).is_dir():  # the present one was to overwrite it, and was killed before it trained
        delete_run(output_dir)
        return
    (output_dir / ASIDE).mkdir()
    for path in list(output_dir.iterdir()):
        if path.name not in (DATA, LOCK, ASIDE):
            os.replace(path, output_dir / ASIDE / path.name)


def bring_back(output_dir: Path) -> None:
    """Move a run that was set aside back into its folder."""
    aside = output_dir / ASIDE
    if aside.is_dir():
        for path in list(aside.iterdir()):
            os.replace(path, output_dir / path.name)
        aside.rmdir()


def delete_run(output_dir: Path) -> None:
    """Delete the files of a run and no others. The recipe is last, so that an interrupted deletion can be repeated."""
    for folder in all_checkpoints_in(output_dir):
        discard(folder)
    remove(output_dir / BASELINE / "runs")
    with contextlib.suppress(OSError):  # it does not exist, or has other files
        (output_dir / BASELINE).rmdir()
    for path in sorted(output_dir.iterdir(), key=lambda path: path.name == RECIPE):
        if _OF_RUNS.fullmatch(path.name):
            remove(path)


def remove_leftovers(output_dir: Path) -> None:
    """Delete incomplete files of a killed run."""
    for folder in all_checkpoints_in(output_dir):
        if not (folder / MANIFEST).exists():
            discard(folder)
    for name in (f"{FINAL}.partial", REPLACED, PARTIAL_TOKENIZERS):
        shutil.rmtree(output_dir / name, ignore_errors=True)
    for path in output_dir.glob(f".*{PARTIAL}"):
        remove(path)
    remove_abandoned(output_dir / DATA)


def replace_folder(new: Path, place: Path, replaced: Path) -> None:
    """Replace a folder by another; if this is interrupted, one of the two is complete."""
    shutil.rmtree(replaced, ignore_errors=True)
    if place.exists():
        os.replace(place, replaced)
    os.replace(new, place)
    shutil.rmtree(replaced, ignore_errors=True)
