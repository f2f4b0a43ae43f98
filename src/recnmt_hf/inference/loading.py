"""Load trained and exported models; the only place that knows their formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from logging import Logger, LogRecord
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging

from .._loading_errors import explained_loading, looks_local
from ..data.tokenizer_pair import TokenizerPair
from ..models.user_errors import MissingFileError, UserError
from .backends.ctranslate2_model import CTranslate2Backend
from .backends.ensemble import EnsembleBackend
from .backends.export_settings import is_export, read_export_settings
from .backends.onnx_model import OnnxBackend, OnnxModel
from .backends.protocol import Backend
from .backends.torch_model import TorchBackend
from .devices import resolve_device
from .model_checks import check_loading
from .model_task import ModelTask, read_model_task
from .quantization import check_quantization, quantize_model


__all__ = ["load_backend", "load_model", "no_model", "quiet_loading", "resolve_device", "without_reports"]

# Endings of files in a model's folder that users mistake for the model.
MODEL_FILES = (".json", ".safetensors")


def load_backend(
    path: str | Path | Sequence[str | Path],
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    check: bool = True,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    **kwargs: Any,
) -> tuple[Backend, ModelTask]:
    """
    Load a model of any format with its tokenizers, and the task that it was trained for. Arguments and errors as of
    [`~recnmt_hf.inference.translator.Translator.from_pretrained`].
    """
    if isinstance(path, (list, tuple)):
        members = [load_backend(one, device, dtype, check, trust_remote_code, quantization, **kwargs) for one in path]
        return EnsembleBackend([backend for backend, _ in members]), members[0][1]
    path = str(path)
    if is_export(path):
        if quantization or dtype:
            raise UserError(
                f"{path} was exported to an engine, with its type of weights. Remedy: leave --dtype and "
                "--quantization out, or export it with another --quantization."
            )
        return load_exported(path, device, check), read_model_task(path)
    if quantization is not None:
        check_quantization(quantization, device, dtype)
        device = "cpu"
    model = load_model(path, device, dtype, trust_remote_code, check, **kwargs)
    tokenizers = TokenizerPair.load(path, trust_remote_code=trust_remote_code, **kwargs)
    backend = TorchBackend(model, tokenizers, check)
    if quantization is not None:
        backend.model = quantize_model(model)
    return backend, read_model_task(path, **kwargs)


def load_exported(path: str, device: str | torch.device | None, check: bool) -> Backend:
    """Load a model that was exported to ONNX or CTranslate2; arguments as of [`load_backend`]."""
    export_format = read_export_settings(path).format
    with explained_loading(path):
        tokenizers = TokenizerPair.load(path)
    if export_format == "onnx":
        return OnnxBackend(OnnxModel(path, device), tokenizers, check)
    return CTranslate2Backend(path, tokenizers, device, check)


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    Load an encoder-decoder in evaluation mode. Code in its files runs only with `trust_remote_code`; there is no prompt
    on standard input.

    Args:
        path (`str` or `Path`): Folder or model id.
        device (`str` or `torch.device`, *optional*): As in [`resolve_device`].
        dtype (`torch.dtype`, *optional*): Data type of the weights; defaults to the saved one.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code in the model's files may run.
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


def no_model(path: str) -> MissingFileError:
    """Return the error for a path without a model. It names a model nearby: in the file's folder, or of the run."""
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
    Silence transformers' report on missing and foreign weights, which says that it can be ignored: [`check_loading`]
    refuses them.
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
    """Disable progress bars of loading where standard error is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        logging.disable_progress_bar()
