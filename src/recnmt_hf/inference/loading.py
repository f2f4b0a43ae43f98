"""Load trained and exported models; the only place that knows their formats."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging

from .._loading_errors import explained_loading, folder_of_model, looks_local
from ..data.languages import list_names
from ..data.tokenizer_pair import TokenizerPair
from ..errors import MissingFileError, UserError
from ..models.kernels_shared import has_bfloat16
from .backends.ctranslate2_model import CTranslate2Backend, default_engine_device
from .backends.onnx_model import OnnxBackend, OnnxModel, load_onnx_runtime, resolve_provider_device
from .backends.protocol import Backend
from .backends.torch_model import EnsembleBackend, TorchBackend
from .devices import check_quantization, pack_weights, quantize_model, resolve_device
from .model_settings import ModelTask, complete_token_ids, is_export, read_export_settings, read_model_task


# Narrower models are slower in bfloat16 than in float32.
LEAST_WIDTH = 128
# Tables that models compute themselves; files of older releases may contain them.
COMPUTED = re.compile(r"(embed_positions\.weights?|position_ids|inv_freq|num_batches_tracked)$")


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
    if looks_local(path):
        check_folder(path)
    if sys.stderr is None or not sys.stderr.isatty():
        logging.disable_progress_bar()
    settings = {} if dtype in (None, "fastest") else {"dtype": dtype}
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
        has_instructions = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else has_bfloat16()
        is_wide = model.config.hidden_size >= LEAST_WIDTH
        model.to(torch.bfloat16 if has_instructions and is_wide else torch.float32)
    return model.to(device).eval()


def check_folder(path: str | Path) -> None:
    """Raise `MissingFileError` for a folder without a model."""
    if not (Path(path) / "config.json").is_file():
        raise MissingFileError(
            f"{str(path)!r} has no config.json. Pass a model's folder (of an unfinished run its newest checkpoint-N) "
            "or a model id.",
            field=path,
        )


def check_loading(model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise `UserError` unless all weights come from the files, and no others, by the report `info`."""
    kinds: dict[str, Collection[str]] = {
        "missing": info["missing_keys"],
        "of another shape": [f"{name} {tuple(saved)} for {tuple(own)}" for name, saved, own in info["mismatched_keys"]],
        "unexpected": [name for name in info["unexpected_keys"] if not COMPUTED.search(name)],
    }
    if faults := [f"{kind}: {list_names(sorted(names))}" for kind, names in kinds.items() if names]:
        raise UserError(f"its weights do not match its config.json ({'; '.join(faults)}).", field=model.name_or_path)


@contextmanager
def silence_loading_report() -> Iterator[None]:
    """Silence transformers' report on missing and unexpected weights, which [`check_loading`] rejects."""
    reporter = logging.get_logger("transformers.modeling_utils")
    reporter.disabled = True  # with another level transformers would report more
    try:
        yield
    finally:
        reporter.disabled = False
