"""Load trained and exported models."""

import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging

from .._loading_errors import explained_loading, folder_of_model, looks_local
from ..data.languages import list_names
from ..data.tokenizer_pair import TokenizerPair
from ..errors import MissingFileError, UserError
from ..models.kernels_shared import has_bfloat16
from ..options import check_value
from .backends.ctranslate2_model import CTranslate2Backend
from .backends.onnx_model import OnnxBackend, OnnxModel
from .backends.protocol import Backend
from .backends.torch_model import EnsembleBackend, TorchBackend
from .devices import Device, pack_weights, quantize_model, resolve_device
from .model_settings import ModelTask, is_export, read_export_settings, read_model_task, setting


LEAST_WIDTH = 128  # narrower models are slower in bfloat16 than in float32
# Tables that models compute themselves; files of older releases may contain them.
COMPUTED = re.compile(r"(embed_positions\.weights?|position_ids|inv_freq|num_batches_tracked)$")


def load_backend(
    path: Any, device: Device, dtype: Any, check: bool, quantization: str | None, **kwargs: Any
) -> tuple[Backend, ModelTask]:
    """Load a model of any format with its tokenizers, and its task; arguments as of `Translator.from_pretrained`."""
    if isinstance(path, (list, tuple)):
        members = [load_backend(one, device, dtype, check, quantization, **kwargs) for one in path]
        return EnsembleBackend([backend for backend, _ in members]), members[0][1]
    path = folder_of_model(str(path))
    if is_export(path):
        if quantization or dtype:
            name = "quantization" if quantization else "dtype"
            raise UserError(f"not supported for {path}: weights of an exported model have a fixed type.", field=name)
        tokenizers = TokenizerPair.load(path)
        if read_export_settings(path)[0] == "onnx":
            return OnnxBackend(OnnxModel(path, device), tokenizers, check), read_model_task(path)
        return CTranslate2Backend(path, tokenizers, device, check), read_model_task(path)
    if quantization is not None:
        check_value("quantization", quantization, Literal["int8"])
        for name, value, needed in (("device", device, "cpu"), ("dtype", dtype, "float32")):
            if value is not None and str(value).removeprefix("torch.").partition(":")[0] != needed:
                raise UserError(f"{value} is not supported with int8 quantization.", field=name)
        device = "cpu"
    model, tokenizers = load_model(path, device, dtype, check=check, **kwargs), TokenizerPair.load(path, **kwargs)
    backend = TorchBackend(model, tokenizers, check)
    if quantization is not None:
        backend.model = quantize_model(model)
    elif model.device.type == "cpu":
        pack_weights(model)
    return backend, read_model_task(path, **kwargs)


def load_model(
    path: Any, device: Device = None, dtype: Any = None, check: bool = True, **kwargs: Any
) -> PreTrainedModel:
    """Load an encoder-decoder in evaluation mode; arguments and errors as of [`Translator.from_pretrained`]."""
    path, device = folder_of_model(path), resolve_device(device)
    if looks_local(path):
        check_folder(path)
    if sys.stderr is None or not sys.stderr.isatty():
        logging.disable_progress_bar()
    kwargs = {"trust_remote_code": False, **kwargs, "use_safetensors": True}  # without a prompt
    if dtype not in (None, "fastest"):
        kwargs["dtype"] = dtype
    with explained_loading(path):
        if check:
            model = load_complete(AutoModelForSeq2SeqLM, path, **kwargs)
        else:
            model = AutoModelForSeq2SeqLM.from_pretrained(path, ignore_mismatched_sizes=True, **kwargs)
    for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, setting(model, name))  # those that generation_config.json lacks
    if dtype == "fastest":
        has_instructions = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else has_bfloat16()
        is_wide = model.config.hidden_size >= LEAST_WIDTH
        model.to(torch.bfloat16 if has_instructions and is_wide else torch.float32)
    return model.to(device).eval()


def check_folder(path: str | Path) -> None:
    """Raise `MissingFileError` for a folder without a model."""
    if not (Path(path) / "config.json").is_file():
        remedy = "Pass a model's folder (of an unfinished run its newest checkpoint-N) or a model id."
        raise MissingFileError(f"{str(path)!r} has no config.json. {remedy}", field=path)


def load_complete(model_class: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `from_pretrained` of a class; `UserError` unless all weights come from the files, and no others."""
    reporter = logging.get_logger("transformers.modeling_utils")
    reporter.disabled = True  # it reports some of the faults below; with another level it would report more
    try:
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = model_class.from_pretrained(*args, **kwargs)
    finally:
        reporter.disabled = False
    kinds: dict[str, Collection[str]] = {
        "missing": info["missing_keys"],
        "of another shape": [f"{name} {tuple(saved)} for {tuple(own)}" for name, saved, own in info["mismatched_keys"]],
        "unexpected": [name for name in info["unexpected_keys"] if not COMPUTED.search(name)],
    }
    if faults := [f"{kind}: {list_names(sorted(names))}" for kind, names in kinds.items() if names]:
        raise UserError(f"its weights do not match its config.json ({'; '.join(faults)}).", field=model.name_or_path)
    return model
