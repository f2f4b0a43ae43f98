"""Plain errors for models and tokenizers that cannot be loaded."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .models.user_errors import UserError


# Errors that these modules raise about a file's content are faults of the file, whoever calls them.
READERS = {"transformers", "huggingface_hub", "tokenizers", "safetensors", "peft"}
ABOUT_FILES = ("OSError", "ValueError", "ImportError", "SafetensorError", "StrictDataclassError")


def looks_local(path: str) -> bool:
    """Whether a model's name is a path: an existing one, or one that a model id cannot be."""
    return Path(path).exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


@contextmanager
def explained_loading(path: str | Path, what: str = "model") -> Iterator[None]:
    """
    Turns what transformers, tokenizers and safetensors say of a folder that they cannot load into a [`UserError`].
    Errors of the zoo's own code pass: they are faults of the program.

    Args:
        path (`str` or `Path`): Folder or model id.
        what (`str`, *optional*, defaults to `"model"`): What is loaded, for the sentence.

    Raises:
        UserError: Always where the block raises an error that the files are to blame for.
    """
    path = str(path)
    try:
        if Path(path).is_dir():
            for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
                check_json_object(Path(path) / name)
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_about_files(error):
            raise
        raise UserError(explain(error, path, what)) from error


def check_json_object(file: Path) -> None:
    """Raises `UserError` for a file that is there and holds no JSON object."""
    if not file.exists():
        return
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        reason = None if isinstance(fields, dict) else f"a {type(fields).__name__}, and an object is needed"
    except OSError as error:
        reason = error.strerror
    except (ValueError, RecursionError) as error:
        reason = str(error)
    if reason is not None:
        raise UserError(f"{file} is no usable JSON ({reason}). Remedy: copy it again from where the model was saved.")


def is_about_files(error: Exception) -> bool:
    """Whether an error that loading raised is about the files and not about the program."""
    here = Path(__file__).parent / "models"
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Who asks for an attribute that is not there is to blame, not who looks for it.
    places = [Path(code.co_filename) for code in codes if code.co_name not in ("__getattr__", "__getattribute__")]
    if places[-1].is_relative_to(here.parent):
        return False
    if any(kind.__name__ in ABOUT_FILES for kind in type(error).__mro__):
        return True
    # The code of a model or configuration calls torch too, and may do so wrongly.
    involved = [place for place in places if place.parent == here or not READERS.isdisjoint(place.parts)]
    return bool(involved) and involved[-1].parent != here


def explain(error: Exception, path: str, what: str) -> str:
    """The sentence for an error of loading."""
    text = str(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "trust_remote_code" in text:
        return (
            f"The {what} {path} brings Python code of its own, which was not run. Remedy: read the code, and if you "
            "trust it, give --trust-remote-code (trust_remote_code=True); commands without that option do not load it."
        )
    found = re.search(r"Unrecognized configuration class <class '.*\.(\w+)'>", text)
    if found:
        return (
            f"{path} holds no translation model but one with a {found[1]}, which is no encoder-decoder. Remedy: give "
            "the folder or the model id of a sequence-to-sequence model."
        )
    if "SafetensorError" in kinds:
        return (
            f"The weights in {path} cannot be read ({text}). The file is cut short or damaged. Remedy: copy it again, "
            "or use an earlier checkpoint."
        )
    if "ignore_mismatched_sizes" in text:
        return (
            f"The weights in {path} have other shapes than its config.json says. Remedy: give the weights and the "
            "config.json of the same model."
        )
    if isinstance(error, OSError) and not Path(path).exists():
        return (
            f"There is no {what} {path}: no such folder is here, and the Hub gives none ({shorten(text)}). Remedy: "
            "correct the name, or see to the connection and to what the token may read."
        )
    names = ("tokenizer.json", "tokenizer_config.json")
    if what.startswith("tokenizer") and Path(path).is_dir() and not any((Path(path) / name).exists() for name in names):
        return (
            f"{path} holds no tokenizer (neither {names[0]} nor {names[1]} is there). Remedy: copy them from where the "
            "model was trained, or write them with the tokenizer's save_pretrained."
        )
    plain = type(error) in (OSError, ValueError, Exception)
    reason = shorten(text) if plain else f"{type(error).__name__}: {shorten(text)}"
    return (
        f"The {what} {path} cannot be loaded ({reason}). Remedy: give a folder that training or save_pretrained wrote, "
        "whole and unchanged."
    )


def shorten(text: str, length: int = 240) -> str:
    """The first paragraph of a message, on one line and without its full stop."""
    first = " ".join(text.strip().split("\n\n")[0].split())
    if len(first) > length:
        whole = first[:length].rpartition(". ")[0]  # whole sentences, where one is short enough
        first = whole or f"{first[:length].rpartition(' ')[0]} ..."
    return first.removesuffix(".") or "no reason is given"


def without_remedy(error: Exception) -> str:
    """Return the text of an error without its remedy."""
    return shorten(str(error).partition(". Remedy: ")[0])
