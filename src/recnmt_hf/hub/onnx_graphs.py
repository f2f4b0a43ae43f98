"""Export of models to ONNX: graphs of the encoder, the decoder, and a step of the decoder."""

import copy
import hashlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import EncoderDecoderCache

from ..data.files import open_output_folder
from ..errors import UserError, packages_of_extra, short_repr
from ..inference.backends.onnx_model import GRAPHS, OF_SOURCE, OF_WORDS, OnnxModel
from ..models.decoder_cache import self_attention_cache
from ..models.seq2seq_outputs import CACHE
from .checked_copy import load_checked
from .engines import write_settings


# One file with the weights of all graphs; smaller ones (bytes) are stored in the graphs.
WEIGHTS, SMALLEST_SHARED = "weights.onnx_data", 1024
SHARED = ("masks", "vectors")  # of a source, in names of the cache
STEPS = "steps"  # name of the number of tokens read, one for each row
# Allowed difference of logits: this share of the largest logit, or this multiple of the model's own rounding error.
TOLERANCE, ROUNDING = 1e-3, 10


def export_onnx(source: str | Path, output: str | Path, **kwargs: Any) -> Path:
    """
    Export a model of any family to ONNX, with its tokenizers. `Translator.from_pretrained` and
    `recnmt translate` load the folder like that of a model.

    | graph | inputs | outputs |
    |---|---|---|
    | `encoder_model.onnx` | `input_ids`, `attention_mask`, trees | states and memories for the decoder |
    | `decoder_model.onnx` | these, any number of `decoder_input_ids` | logits, cache (`present.*`) |
    | `decoder_with_past_model.onnx` | these, one word, cache (`past.*`) | logits, changed parts of the cache |

    Models that read dependency trees have the inputs `dependency_heads` and `dependency_relations`, with one edge for
    each token; [`OnnxModel`] sets missing ones to -1, no edge. Batch sizes and lengths are free. The graphs share the
    weights in `weights.onnx_data`. They are run on sentences that were not used for the export, and must give the
    model's logits.

    Arguments, return value and errors are those of [`~recnmt_hf.export_ctranslate2`], without `quantization`.
    """
    with packages_of_extra("onnx", "Export to ONNX"):
        import onnx  # noqa: F401
        import onnxruntime  # type: ignore[import-untyped]  # noqa: F401
        import onnxscript  # noqa: F401
    model, tokenizers = load_checked(source, **kwargs)
    # Models whose cache has no graphs, and random outputs, which would ignore a seed.
    field = model.config.random_field if hasattr(model, "init_from_baseline") else "model_type"
    if field is not None:
        value = short_repr(getattr(model.config, field))
        raise UserError(f"ONNX does not support {field}={value}. Use `recnmt translate`.", field=field)
    model = model.float()
    with open_output_folder(output, must_be_new=True) as working:
        programs = graphs_of(model)
        save_graphs(programs, working)
        tokenizers.save(working)
        write_settings(model, source, working, format="onnx", quantization="float32")
        check_logits(model, OnnxModel(working, "cpu"))
    return Path(output)


class EncoderGraph(nn.Module):
    """Computes states and memories of a source."""

    def __init__(self, model: Any):
        super().__init__()
        self.encoder = model.get_encoder()
        memories = [name for memory in self.encoder.output_class.memory_fields.values() for name in memory]
        self.read = {"last_hidden_state", *memories}

    def forward(self, input_ids: torch.Tensor, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs by name; `tensors` are the mask and the encoder's `source_inputs`."""
        inputs = dict(zip(("attention_mask", *self.encoder.source_inputs), tensors, strict=True))
        outputs = self.encoder(input_ids=input_ids, **inputs, return_dict=True)
        return {name: value for name, value in outputs.items() if name in self.read and value is not None}


class DecoderGraph(nn.Module):
    """Computes logits and cache from a source and words or, with `cache_names`, from one word and a cache."""

    def __init__(self, model: Any, encoder_names: Sequence[str], cache_names: Sequence[str] = ()):
        super().__init__()
        self.model, self.encoder_names, self.cache_names = model, list(encoder_names), list(cache_names)

    def forward(self, decoder_input_ids: torch.Tensor, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs by name; `tensors` are those of the encoder, then the cache or the mask of the source."""
        rows, count = decoder_input_ids.shape[0], len(self.encoder_names)
        if any(tensor.shape[0] != rows for tensor in tensors):  # the exporter uses this
            raise ValueError("Words, sources and cache have different batch sizes.")
        # A cache contains everything that depends on the source: the encoder's output is required but not read.
        encoded = self.model.get_encoder().output_class(**dict(zip(self.encoder_names, tensors[:count], strict=True)))
        inputs: dict[str, Any] = {"decoder_input_ids": decoder_input_ids, "encoder_outputs": encoded}
        if self.cache_names:
            cache = self.model.model.decoder.prepare_cache(None, True)
            fill_cache(cache, dict(zip(self.cache_names, tensors[count:], strict=True)))
            inputs["cache"] = cache
        else:
            (inputs["attention_mask"],) = tensors[count:]
        outputs = self.model(**inputs, use_cache=True, return_dict=True)
        cached = flatten_cache(getattr(outputs, CACHE))
        kept = {name: tensor for name, tensor in cached.items() if not self.cache_names or name.startswith(OF_WORDS)}
        return {"logits": outputs.logits, **{f"present.{name}": tensor for name, tensor in kept.items()}}


def flatten_cache(cache: EncoderDecoderCache) -> dict[str, torch.Tensor]:
    """Return a cache's tensors by name, with the number of tokens read if no keys of the first layer show it."""
    tensors: dict[str, torch.Tensor] = {}
    layers: Any = self_attention_cache(cache).layers
    if layers[0].keys is None or not layers[0].keys.numel():
        state = next(iter(layers[0].states.values()))
        tensors[f"{OF_WORDS}0.{STEPS}"] = state.new_zeros(state.shape[0], dtype=torch.long) + layers[0].steps_seen
    for number, layer in enumerate(layers):
        if layer.keys is not None and layer.keys.numel():
            tensors |= {f"{OF_WORDS}{number}.keys": layer.keys, f"{OF_WORDS}{number}.values": layer.values}
        for name, state in getattr(layer, "states", {}).items():
            tensors[f"{OF_WORDS}{number}.states.{name}"] = state
    sources: Any = cache.cross_attention_cache
    for number, layer in enumerate(sources.layers):
        for name, (keys, values) in layer.memories.items():
            tensors |= {f"{OF_SOURCE}{number}.{name}.keys": keys, f"{OF_SOURCE}{number}.{name}.values": values}
    for kind in SHARED:
        shared = getattr(sources, kind).items()
        tensors |= {f"{OF_SOURCE}{kind}.{name}": tensor for name, tensor in shared if tensor is not None}
    return tensors


def fill_cache(cache: EncoderDecoderCache, tensors: dict[str, torch.Tensor]) -> None:
    """Put the tensors of [`flatten_cache`] into an empty cache."""

    def parts_of(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}

    layers: Any = self_attention_cache(cache).layers
    sources: Any = cache.cross_attention_cache
    for number, layer in enumerate(layers):
        if parts := parts_of(f"{OF_WORDS}{number}."):
            layer.lazy_initialization(*[next(iter(parts.values()))] * 2)
            if "keys" in parts:
                layer.keys, layer.values = parts["keys"], parts["values"]
            if states := parts_of(f"{OF_WORDS}{number}.states."):
                layer.states |= states
                layer.steps_seen = parts[STEPS][0].clone() if STEPS in parts else 1
    for number, layer in enumerate(sources.layers):
        parts = parts_of(f"{OF_SOURCE}{number}.")
        for memory in (name.removesuffix(".keys") for name in parts if name.endswith(".keys")):
            layer.store(memory, parts[f"{memory}.keys"], parts[f"{memory}.values"])
            cache.is_updated[number] = True
    for kind in SHARED:
        getattr(sources, kind).update(parts_of(f"{OF_SOURCE}{kind}."))


@torch.no_grad()
def graphs_of(model: Any) -> dict[str, Any]:
    """Export the graphs; return them by file name."""
    model.set_attn_implementation("eager")  # exported kernels are wrong for a word that attends to no other
    config = model.config
    batch, most = torch.export.Dim("batch_size"), getattr(config, "max_position_embeddings", None)
    source, words, read = (
        torch.export.Dim(name, max=most if side in config.sides_with_positions else None)
        for name, side in (("source_length", "source"), ("target_length", "target"), ("words_read", "target"))
    )
    # Several sentences of different lengths, because the exporter treats sizes of 1 as fixed.
    # They differ from all sizes of the model, so that axes of lengths can be identified by size.
    taken = {value for value in config.to_dict().values() if isinstance(value, int)}
    taken |= {config.d_model // value for value in taken if value}  # widths of heads
    words_length, length = [length for length in (5, 7, 11, 13, 17, 19, 23) if length not in taken][:2]
    input_ids = torch.arange(3 * length).view(3, length) % min(config.vocab_size, config.decoder_vocab_size)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, words_length:] = 0
    target = input_ids[:, :words_length].contiguous()
    for name in ("torch.onnx._internal.exporter", "onnxscript"):  # they warn of optional optimizations
        logging.getLogger(name).setLevel(logging.ERROR)

    def export(graph: nn.Module, inputs: dict[str, torch.Tensor], of_words: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the graph, without inputs that it does not read, and its outputs by name."""
        outputs, lengths = graph.eval()(*inputs.values()), {length: source, words_length: of_words}
        first, *others = (
            {0: batch, **{axis: lengths[size] for axis, size in enumerate(tensor.shape) if axis and size in lengths}}
            for tensor in inputs.values()
        )
        settings: dict[str, Any] = {"input_names": list(inputs), "dynamic_shapes": (first, tuple(others))}
        with warnings.catch_warnings(action="ignore"):
            program: Any = torch.onnx.export(graph, tuple(inputs.values()), dynamo=True, verbose=False, **settings)
        inner = program.model.graph
        for value in [value for value in inner.inputs if not value.uses()]:
            inner.inputs.remove(value)
        for value, name in zip(inner.outputs, outputs, strict=True):
            value.name = name
        return program, outputs

    # Trees in which all words depend on the first.
    columns = {name: torch.zeros_like(input_ids) for name in model.get_encoder().source_inputs}
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **columns}
    encoder, encoded = export(EncoderGraph(model), inputs, words)
    inputs = {"decoder_input_ids": target, **encoded, "attention_mask": attention_mask}
    decoder, outputs = export(DecoderGraph(model, list(encoded)), inputs, words)
    cache = {name.removeprefix("present."): tensor for name, tensor in outputs.items() if name != "logits"}
    inputs = {"decoder_input_ids": target[:, :1], **encoded, **{f"past.{name}": one for name, one in cache.items()}}
    step, _ = export(DecoderGraph(model, list(encoded), list(cache)), inputs, read)
    return dict(zip(GRAPHS, (encoder, decoder, step), strict=True))


def save_graphs(programs: dict[str, Any], folder: Path) -> None:
    """Save the graphs, and one file with the weights of all of them, without duplicates."""
    import onnx_ir  # part of onnxscript
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    places: dict[tuple[Any, ...], tuple[int, int]] = {}
    with open(folder / WEIGHTS, "wb") as file:
        for program in programs.values():
            for value in program.model.graph.initializers.values():
                tensor = value.const_value
                if tensor.nbytes < SMALLEST_SHARED:
                    continue
                raw = tensor.tobytes()
                key = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).digest())
                if key not in places:
                    file.write(b"\0" * (-file.tell() % 4096))  # for memory mapping
                    places[key] = (file.tell(), len(raw))
                    file.write(raw)
                offset, length = places[key]
                about = {"shape": tensor.shape, "name": value.name, "base_dir": str(folder)}
                value.const_value = onnx_ir.ExternalTensor(WEIGHTS, offset, length, tensor.dtype, **about)
    for name, program in programs.items():
        model = program.model
        ClearMetadataAndDocStringPass()(model)  # notes on the origin of each node contain paths of this machine
        model.metadata_props.clear()
        onnx_ir.save(model, folder / name)


@torch.no_grad()
def check_logits(model: Any, graphs: OnnxModel) -> None:
    """Raise `UserError` if the logits of the graphs differ from the model's, for sentences not used for the export."""
    rows = min(model.config.vocab_size, model.config.decoder_vocab_size)
    for batch, source, words in ((4, 9, 4), (1, 1, 1), (2, 3, 2)):
        input_ids = (torch.arange(batch * source) * 13).view(batch, source) % rows
        attention_mask = torch.ones_like(input_ids)
        attention_mask[0, max(source // 2, 1) :] = 0
        target = (torch.arange(batch * (words + 3)) * 7).view(batch, -1) % rows
        columns = {name: torch.zeros_like(input_ids) for name in model.get_encoder().source_inputs}
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **columns}
        first = graphs(**inputs, decoder_input_ids=target[:, :words], use_cache=True)
        rest = graphs(decoder_input_ids=target[:, words:], cache=getattr(first, CACHE))
        logits = torch.cat([first.logits, rest.logits], 1)
        inputs["decoder_input_ids"] = target
        expected = model(**inputs, use_cache=False).logits
        distance, allowed = float((logits - expected).abs().max()), TOLERANCE * max(1.0, float(expected.abs().max()))
        if not distance <= allowed:
            exact = copy.deepcopy(model).double()(**inputs, use_cache=False).logits
            if not distance <= ROUNDING * float((exact - expected).abs().max()):
                raise UserError(f"The graphs' logits differ from the model's by {distance:.2g}; nothing was written.")
