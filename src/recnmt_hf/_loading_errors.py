"""Places of models, and plain errors for models and tokenizers that cannot be loaded."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ._bounded_reading import read_small_text
from .errors import MissingFileError, UserError


# Errors that these packages raise about the content of a file are faults of the file, whoever calls them.
READERS = {"transformers", "huggingface_hub", "tokenizers", "safetensors", "peft"}
ABOUT_FILES = ("OSError", "ValueError", "ImportError", "SafetensorError", "StrictDataclassError")
# Folder of the final model in that of a run.
FINAL = "model"
# Maximum number of characters of a quoted reason.
LONGEST = 240


def looks_local(path: str) -> bool:
    """Return whether the name of a model is a path: an existing one, or one that cannot be a model id."""
    return Path(path).exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def folder_of_model(path: str | Path) -> str:
    """Return the final model's folder for that of a run, and every other path or model id as it is."""
    path, final = str(path), Path(path) / FINAL
    has_own = not path or (Path(path) / "config.json").is_file()
    return path if has_own or not (final / "config.json").is_file() else str(final)


@contextmanager
def explained_loading(path: str | Path, what: str = "model") -> Iterator[None]:
    """
    Turn errors of transformers, tokenizers and safetensors about the files of a folder or model id into a
    [`UserError`], which calls the loaded object `what`. Errors of our own code pass unchanged: they are bugs.
    """
    path = str(path)
    try:
        if Path(path).is_dir():
            for file in Path(path).iterdir():
                if file.exists() and not (file.is_file() or file.is_dir()):  # a device may never end
                    raise UserError(f"{file} is a device or a pipe.", field=file)
            for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
                check_json_object(Path(path) / name)
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_about_files(error):
            raise
        raise explain(error, path, what) from error


def check_json_object(file: Path) -> None:
    """Raise `UserError` for an existing file that does not contain a JSON object."""
    try:
        content = json.loads(read_small_text(file))
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} instead of an object")
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a valid JSON object ({error}).", field=file) from error


def is_about_files(error: Exception) -> bool:
    """Return whether an error that loading raised is about the files and not a bug."""
    models = Path(__file__).parent / "models"
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The caller that asks for a missing attribute is to blame, not the method that looks it up.
    places = [Path(code.co_filename) for code in codes if code.co_name not in ("__getattr__", "__getattribute__")]
    if places[-1].is_relative_to(models.parent):
        return False
    if any(kind.__name__ in ABOUT_FILES for kind in type(error).__mro__):
        return True
    # The code of a model or configuration calls torch too, and may do so wrongly.
    involved = [place for place in places if place.parent == models or not READERS.isdisjoint(place.parts)]
    return bool(involved) and involved[-1].parent != models


def explain(error: Exception, path: str, what: str) -> UserError:
    """Return the [`UserError`] for an error of loading."""
    text = str(error)
    if "trust_remote_code" in text:
        return UserError(
            f"The {what} {path} contains Python code, which was not run. If you trust it, pass --trust-remote-code "
            "(trust_remote_code=True). Commands without this option cannot load it.",
            field=path,
        )
    if match := re.search(r"Unrecognized configuration class <class '.*\.(\w+)'>", text):
        return UserError(f"{path} is a {match[1]}, not a sequence-to-sequence model.", field=path)
    if "SafetensorError" in {kind.__name__ for kind in type(error).__mro__}:
        return UserError(f"The weights in {path} are damaged ({text}).", field=path)
    if "ignore_mismatched_sizes" in text:
        return UserError(f"The weights in {path} do not have the shapes of its config.json.", field=path)
    if isinstance(error, OSError) and not Path(path).exists():
        return MissingFileError(
            f"The {what} {path} was not found as a folder or on the Hub ({shorten(text)}). Correct the name, or check "
            "the connection and the permissions of the access token.",
            field=path,
        )
    names = ("tokenizer.json", "tokenizer_config.json")
    if what.startswith("tokenizer") and Path(path).is_dir() and not any((Path(path) / name).exists() for name in names):
        return MissingFileError(f"{path} has no tokenizer.json or tokenizer_config.json.", field=path)
    reason = shorten(text)
    if type(error) not in (OSError, ValueError, Exception):
        reason = f"{type(error).__name__}: {reason}"
    return UserError(f"The {what} {path} cannot be loaded ({reason}).", field=path)


def shorten(text: str) -> str:
    """Return the first paragraph of a message, on one line and without its full stop."""
    first = " ".join(text.strip().split("\n\n")[0].split())
    if len(first) > LONGEST:
        sentences = first[:LONGEST].rpartition(". ")[0]
        first = sentences or f"{first[:LONGEST].rpartition(' ')[0]} ..."
    return first.removesuffix(".") or "no reason is given"


def remove_remedy(error: Exception) -> str:
    """Return the text of an error; of a [`UserError`], without the last sentence, which is the remedy."""
    text = str(error)
    return shorten(text.rpartition(". ")[0] or text if isinstance(error, UserError) else text)
