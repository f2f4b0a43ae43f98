"""Loading a trained model onto a device, with a sentence for everything that can be wrong with its files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from logging import Logger, LogRecord
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging

from .._loading_errors import explained_loading, looks_local
from ..models.user_errors import MissingFileError, UserError
from .model_checks import check_loading


# Files that stand in a model's folder, and are taken for the model.
MODEL_FILES = (".json", ".safetensors")


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    An encoder-decoder in evaluation mode. Code that its files bring along is never run unasked, and nothing is asked on
    standard input.

    Args:
        path (`str` or `Path`): Folder or model id.
        device (`str` or `torch.device`, *optional*): As in [`resolve_device`].
        dtype (`torch.dtype`, *optional*): Weights' data type; `None`: as saved.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the model's own may run.
        check (`bool`, *optional*, defaults to `True`): Whether missing, misshapen and foreign weights are refused.
        **kwargs: Passed on to `from_pretrained`.

    Raises:
        FileNotFoundError: A local path does not exist or holds no model.
        ValueError: There is no such model or device, or its files are damaged or do not belong together.
    """
    if not str(path):
        raise MissingFileError(
            "'' holds no model: the name is empty. Remedy: give the folder that training or save_pretrained wrote, or "
            "a model id of the Hub."
        )
    path, device = str(path), resolve_device(device)
    if looks_local(path) and not (Path(path) / "config.json").is_file():
        raise no_model(path)
    settings = {"dtype": dtype} if dtype is not None else {}
    quiet_loading()
    with explained_loading(path), without_reports() if check else nullcontext():
        model, info = AutoModelForSeq2SeqLM.from_pretrained(
            path,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # all of them are named below
            **settings,
            **kwargs,
        )
    if check:
        check_loading(model, info)
    return model.to(device).eval()


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """
    A device that is there.

    Args:
        device (`str` or `torch.device`, *optional*): `None`: CUDA if there is any, else the CPU.

    Raises:
        ValueError: It names no device, or one that this machine has not.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        reason = "no such kind is known" if reason.startswith("Expected one of") else reason
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise UserError(
            f"The device {str(device)!r} cannot be used ({reason}). Remedy: this machine has {', '.join(there)}."
        ) from error
    return found


def no_model(path: str) -> MissingFileError:
    """The error for a path without a model, with the model that is near: a file's own folder, or that of a run."""
    place, near = Path(path), []
    if place.is_file():
        what, near = f"{path} is a file, and holds no model", [place.parent] if place.suffix in MODEL_FILES else []
    else:
        what = f"{path} holds no model (config.json is missing)"
        checkpoints = [each for each in place.glob("checkpoint-*") if each.name[11:].isdigit()]
        newest = sorted(checkpoints, key=lambda each: int(each.name[11:]), reverse=True)
        near = [place / "model", *newest]
    found = next((folder for folder in near if (folder / "config.json").is_file()), None)
    hint = "the folder that training or save_pretrained wrote, or a model id of the Hub"
    return MissingFileError(f"{what}. Remedy: give {hint if found is None else found}.")


@contextmanager
def without_reports() -> Iterator[None]:
    """
    Silences transformers' report on missing and foreign weights, which says that it can be ignored, where
    [`check_loading`] refuses them.
    """
    # By its type in transformers it takes no function as a filter; by that of `logging` it does.
    reporter = cast("Logger", logging.get_logger("transformers.modeling_utils"))

    def is_error(record: LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    reporter.addFilter(is_error)  # a level of its own would have transformers look for more to report
    try:
        yield
    finally:
        reporter.removeFilter(is_error)


def quiet_loading() -> None:
    """Bars of weights that are read belong on a terminal, not into a log file."""
    if sys.stderr is None or not sys.stderr.isatty():
        logging.disable_progress_bar()
