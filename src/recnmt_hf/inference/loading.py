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

from .._loading_errors import explained_loading, folder_of_model, looks_local
from ..data.tokenizer_pair import TokenizerPair
from ..errors import MissingFileError, UserError
from ..models.kernels_shared import has_bfloat16
from .backends.ctranslate2_model import CTranslate2Backend, default_engine_device
from .backends.ensemble import EnsembleBackend
from .backends.export_settings import is_export, read_export_settings
from .backends.onnx_model import OnnxBackend, OnnxModel, load_onnx_runtime, resolve_provider_device
from .backends.protocol import Backend
from .backends.torch_model import TorchBackend
from .devices import resolve_device
from .model_checks import check_loading
from .model_settings import ModelTask, complete_token_ids, read_model_task
from .packing import pack_weights
from .quantization import check_quantization, quantize_model


def load_backend(
    path: str | Path | Sequence[str | Path],
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    check: bool = True,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    **kwargs: Any,
) -> tuple[Backend, ModelTask]:
    """Load a model of any format with its tokenizers, and its task; arguments as of `Translator.from_pretrained`."""
    if isinstance(path, (list, tuple)):
        members = [load_backend(one, device, dtype, check, trust_remote_code, quantization, **kwargs) for one in path]
        return EnsembleBackend([backend for backend, _ in members]), members[0][1]
    path = folder_of_model(str(path))
    if is_export(path):
        if quantization or dtype:
            name = "quantization" if quantization else "dtype"
            raise UserError(f"not supported for {path}: weights of an exported model have a fixed type.", field=name)
        with explained_loading(path):
            tokenizers = TokenizerPair.load(path)
        if read_export_settings(path).format == "onnx":
            return OnnxBackend(OnnxModel(path, device), tokenizers, check), read_model_task(path)
        return CTranslate2Backend(path, tokenizers, device, check), read_model_task(path)
    if quantization is not None:
        check_quantization(quantization, device, dtype)
        device = "cpu"
    model = load_model(path, device, dtype, trust_remote_code, check, **kwargs)
    tokenizers = TokenizerPair.load(path, trust_remote_code=trust_remote_code, **kwargs)
    backend = TorchBackend(model, tokenizers, check)
    if quantization is not None:
        backend.model = quantize_model(model)
    elif model.device.type == "cpu":
        pack_weights(model)
    return backend, read_model_task(path, **kwargs)


def default_device(path: str | Path, quantization: str | None = None) -> str:
    """Return `"cuda"` or `"cpu"`, where [`load_backend`] loads a model if no device is given."""
    if not is_export(path):
        return "cpu" if quantization else resolve_device().type
    is_onnx = read_export_settings(path).format == "onnx"
    return resolve_provider_device(load_onnx_runtime(), None).type if is_onnx else default_engine_device()


# Narrower models are slower in bfloat16 than in float32.
LEAST_WIDTH = 128


def fastest_dtype(device: torch.device, width: int) -> torch.dtype:
    """Return bfloat16 where the device has instructions for it, and layers are wide enough to gain, else float32."""
    has_instructions = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else has_bfloat16()
    return torch.bfloat16 if has_instructions and width >= LEAST_WIDTH else torch.float32


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    Load an encoder-decoder in evaluation mode; arguments as of `Translator.from_pretrained`. `check` rejects
    weights that are missing, unexpected or of the wrong shape. Code in the files of the model runs only with
    `trust_remote_code`, without a prompt.

    Raises:
        FileNotFoundError: A local path does not exist or holds no model.
        ValueError: There is no such model or device, or its files are damaged or do not belong together.
    """
    path, device = folder_of_model(path), resolve_device(device)
    if not path or (looks_local(path) and not (Path(path) / "config.json").is_file()):
        raise missing_model_error(path)
    settings = {} if dtype in (None, "fastest") else {"dtype": dtype}
    quiet_loading()
    with explained_loading(path), silence_loading_report() if check else nullcontext():
        model, info = AutoModelForSeq2SeqLM.from_pretrained(
            path,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loading reports all of them
            **settings,
            **kwargs,
        )
    if check:
        check_loading(model, info)
    complete_token_ids(model)
    if dtype == "fastest":
        model.to(fastest_dtype(device, model.config.hidden_size))
    return model.to(device).eval()


def missing_model_error(path: str) -> MissingFileError:
    """Return the error for a path without a model. It names the newest checkpoint of a run that is not finished."""
    folders = [file.parent for file in Path(path).glob("checkpoint-*/config.json") if file.parent.name[11:].isdigit()]
    if not path or not folders:
        return MissingFileError(f"{path!r} has no config.json. Pass a model's folder or a model id.", field=path)
    newest = max(folders, key=lambda folder: int(folder.name[11:]))
    return MissingFileError(f"{path} is not a model's folder, but {newest} is.", field=path)


@contextmanager
def silence_loading_report() -> Iterator[None]:
    """Silence transformers' report on missing and unexpected weights, which [`check_loading`] rejects."""
    # Unlike that of `logging`, its type in transformers does not take a function as a filter.
    reporter = cast("Logger", logging.get_logger("transformers.modeling_utils"))

    def is_error(record: LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    reporter.addFilter(is_error)  # with another level transformers would report more
    try:
        yield
    finally:
        reporter.removeFilter(is_error)


def quiet_loading() -> None:
    """Disable progress bars of loading unless standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        logging.disable_progress_bar()
