"""Models of every family as graphs of ONNX: the encoder, the decoder, and the decoder's next word."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import EncoderDecoderCache

from .._loading_errors import shorten
from ..data.files import open_output_folder
from ..data.tokenizer_pair import TokenizerPair
from ..inference.backends.export_settings import ENGINE_SETTINGS
from ..inference.backends.onnx_model import (
    DECODER,
    ENCODER,
    GRAPHS,
    OF_SOURCE,
    OF_WORDS,
    STEP,
    OnnxModel,
    load_onnx_runtime,
)
from ..inference.loading import load_model
from ..inference.model_checks import check_weights
from ..models.source_memory import self_attention_cache
from ..models.user_errors import UserError
from ..training.evidence import Evidence


# All graphs read their weights from one file, each once.
WEIGHTS = "weights.onnx_data"
SMALLEST_SHARED = 1024  # bytes; smaller ones stand in the graphs
PAGE = 4096  # where weights begin in the file, so that it can be mapped
# Differences of logits that are rounding: this share of the largest one, or as many times what float32 has of its own.
TOLERANCE = 1e-3
ROUNDING = 10


def export_onnx(source: str | Path, output: str | Path) -> Path:
    """
    Writes a model of any family as three graphs of ONNX in float32, with its tokenizers;
    `Translator.from_pretrained` and `recnmt translate` take the folder as they take a model's.

    `encoder_model.onnx` makes of `input_ids` and `attention_mask` what the decoder reads; `decoder_model.onnx` makes of
    that and any number of `decoder_input_ids` their logits and the cache (`present.*`); `decoder_with_past_model.onnx`
    makes of one further word and the cache (`past.*`) the next logits and what of the cache has changed. Batch sizes
    and lengths are free. Weights stand once, in `weights.onnx_data`.

    Args:
        source (`str` or `Path`): Folder or model id.
        output (`str` or `Path`): A new folder.

    Returns:
        The folder. The graphs in it have been run on other sentences than they were made with, and gave the model's
        logits.

    Raises:
        ValueError: A package is missing, the exporter cannot follow the model, or the files are damaged.
        FileExistsError: The output is there and not empty.
    """
    load_onnx_packages()
    model: Any = load_model(source, "cpu")
    check_weights(model)
    if not hasattr(model, "init_from_baseline"):
        raise UserError(
            f"{source} is no model of this zoo but a {model.config.model_type}. Remedy: import it (recnmt "
            "import-marian), or export it with Optimum."
        )
    tokenizers = TokenizerPair.load(source)
    tokenizers.check(model)
    model = model.float()
    with open_output_folder(output, must_be_new=True) as working:
        with torch.no_grad():
            programs = graphs_of(model)
        save_graphs(programs, Path(working))
        del programs
        tokenizers.save(working)
        about = {"config": model.config.to_dict(), "generation_config": model.generation_config.to_dict()}
        about |= {"format": "onnx", "quantization": "float32"}
        (working / ENGINE_SETTINGS).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
        check_same(model, OnnxModel(working, "cpu"))
        evidence = Evidence.load(source) if Path(source).is_dir() else Evidence()
        evidence.tests = []  # they are of the model as torch runs it
        evidence.save(working)
    return Path(output)


def load_onnx_packages() -> None:
    """Raises `UserError` where a package that makes graphs is missing or too old."""
    load_onnx_runtime()
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f'Exporting to ONNX needs more packages ({error}). Remedy: pip install "recnmt-hf[onnx]".'
        ) from None
    if not hasattr(torch.compiler, "is_exporting"):
        raise UserError(
            f"torch {torch.__version__} unrolls recurrences in exported graphs. Remedy: a newer one, as 2.13 is."
        )


# -- what the graphs compute -------------------------------------------------------------------------------------------


class EncoderGraph(nn.Module):
    """From a source to what the decoder reads of it."""

    def __init__(self, model: Any):
        super().__init__()
        self.encoder = model.get_encoder()
        memories = {each.name for each in fields(self.encoder.output_class) if "memory" in each.metadata}
        self.read = {"last_hidden_state", *memories}
        self.names: list[str] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        self.names = [name for name, value in outputs.items() if name in self.read and value is not None]
        return tuple(outputs[name] for name in self.names)


class DecoderGraph(nn.Module):
    """From what the encoder gave and words to logits and a cache."""

    def __init__(self, model: Any, encoder_names: Sequence[str]):
        super().__init__()
        self.model, self.encoder_names = model, list(encoder_names)
        self.names: list[str] = []

    def forward(
        self, decoder_input_ids: torch.Tensor, attention_mask: torch.Tensor, *encoded: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if any(tensor.shape[0] != decoder_input_ids.shape[0] for tensor in (attention_mask, *encoded)):
            raise ValueError("There are other sources than rows of words.")  # which tells the exporter, too
        outputs = self.model(
            decoder_input_ids=decoder_input_ids,
            attention_mask=attention_mask,
            encoder_outputs=self.model.get_encoder().output_class(
                **dict(zip(self.encoder_names, encoded, strict=True))
            ),
            use_cache=True,
            return_dict=True,
        )
        found = flattened(outputs.past_key_values)
        self.names = ["logits", *(f"present.{name}" for name in found)]
        return outputs.logits, *found.values()


class StepGraph(nn.Module):
    """From one word and a cache to the next logits and what of the cache has changed."""

    def __init__(self, model: Any, encoder_names: Sequence[str], cache_names: Sequence[str]):
        super().__init__()
        self.model, self.encoder_names, self.cache_names = model, list(encoder_names), list(cache_names)
        self.names: list[str] = []

    def forward(self, decoder_input_ids: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        encoded, kept = given[: len(self.encoder_names)], given[len(self.encoder_names) :]
        rows = decoder_input_ids.shape[0]
        if any(tensor.shape[0] != rows for tensor in given):  # which tells the exporter, too
            raise ValueError("The cache has other rows than there are words.")
        cache = self.model.model.decoder.prepare_cache(None, True)
        fill(cache, dict(zip(self.cache_names, kept, strict=True)), rows)
        # The cache has everything that depends on the source: the encoder's output is required but not read.
        outputs = self.model(
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=self.model.get_encoder().output_class(
                **dict(zip(self.encoder_names, encoded, strict=True))
            ),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        found = flattened(outputs.past_key_values)
        changed = [name for name in found if name.startswith(OF_WORDS)]
        self.names = ["logits", *(f"present.{name}" for name in changed)]
        return outputs.logits, *(found[name] for name in changed)


def flattened(cache: EncoderDecoderCache) -> dict[str, torch.Tensor]:
    """The tensors of a cache by name."""
    found: dict[str, torch.Tensor] = {}
    layers: Any = self_attention_cache(cache).layers
    for number, layer in enumerate(layers):
        if layer.keys is not None and layer.keys.numel():
            found |= {f"{OF_WORDS}{number}.keys": layer.keys, f"{OF_WORDS}{number}.values": layer.values}
        for name, state in getattr(layer, "states", {}).items():
            found[f"{OF_WORDS}{number}.states.{name}"] = state
    sources: Any = cache.cross_attention_cache.layers
    for number, layer in enumerate(sources):
        for name, (keys, values) in layer.memories.items():
            found |= {f"{OF_SOURCE}{number}.{name}.keys": keys, f"{OF_SOURCE}{number}.{name}.values": values}
        for kind in ("masks", "vectors"):
            for name, tensor in getattr(layer, kind).items():
                if tensor is not None:
                    found[f"{OF_SOURCE}{number}.{kind}.{name}"] = tensor
    return found


def fill(cache: EncoderDecoderCache, tensors: dict[str, torch.Tensor], rows: int) -> None:
    """Puts the tensors of [`flattened`] into an empty cache, as they are after the first word at least."""
    layers: Any = self_attention_cache(cache).layers
    sources: Any = cache.cross_attention_cache.layers
    found: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        side, place, part = name.split(".", 2)
        found.setdefault((side, int(place)), {})[part] = tensor
    for (side, number), parts in found.items():
        if f"{side}." == OF_WORDS:
            layer = layers[number]
            first = next(iter(parts.values()))
            layer.lazy_initialization(first, first)
            if "keys" in parts:
                layer.keys, layer.values = parts.pop("keys"), parts.pop("values")
            for name, state in parts.items():
                layer.states[name.removeprefix("states.")] = state
                layer.steps_seen = 1
            continue
        layer = sources[number]
        for name in [name for name in parts if name.endswith(".keys")]:
            memory = name.removesuffix(".keys")
            layer.store(memory, parts[name], parts[f"{memory}.values"], rows)
            cache.is_updated[number] = True
        for kind in ("masks", "vectors"):
            start = f"{kind}."
            held = {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
            getattr(layer, kind).update(held)


# -- making them -------------------------------------------------------------------------------------------------------


def graphs_of(model: Any) -> dict[str, Any]:
    """
    The programs of torch's exporter, by their file's name. The model's attention becomes the plain one: what the
    exporter makes of the kernels is wrong where a word sees no other.
    """
    model.set_attn_implementation("eager")
    config = model.config
    batch, most = torch.export.Dim("batch_size"), getattr(config, "max_position_embeddings", None)
    source, words, read = (
        torch.export.Dim(name, max=most if side in config.sides_with_positions else None)
        for name, side in (("source_length", "source"), ("target_length", "target"), ("words_read", "target"))
    )
    # Any tokens will do; several sentences, and of several lengths, since numbers of 1 would count as fixed.
    seen, length = lengths_of_its_own(config)
    input_ids = torch.arange(3 * length).view(3, length) % min(config.vocab_size, config.decoder_vocab_size)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, seen:] = 0
    target = input_ids[:, :seen].contiguous()
    of_source = {0: batch, 1: source}

    encoder = EncoderGraph(model)
    names = ["input_ids", "attention_mask"]
    encoded = encoder(input_ids, attention_mask)
    programs = {ENCODER: export(encoder, (input_ids, attention_mask), names, (of_source, of_source))}

    decoder = DecoderGraph(model, encoder.names)
    shapes = tuple(free_axes(tensor, {length: source}, batch) for tensor in encoded)
    names = ["decoder_input_ids", "attention_mask", *encoder.names]
    given = (target, attention_mask, *encoded)
    _, *kept = decoder(*given)
    programs[DECODER] = export(decoder, given, names, ({0: batch, 1: words}, of_source, shapes))

    cache_names = [name.removeprefix("present.") for name in decoder.names[1:]]
    step = StepGraph(model, encoder.names, cache_names)
    axes = [
        free_axes(tensor, {seen: read} if name.startswith(OF_WORDS) else {length: source}, batch)
        for name, tensor in zip(cache_names, kept, strict=True)
    ]
    given = (target[:, :1], *encoded, *kept)
    step(*given)  # which finds its outputs' names
    names = ["decoder_input_ids", *encoder.names, *(f"past.{name}" for name in cache_names)]
    programs[STEP] = export(step, given, names, ({0: batch}, (*shapes, *axes)))
    return programs


def lengths_of_its_own(config: Any) -> tuple[int, int]:
    """Two lengths of sentences that no axis of the model's tensors has for another reason."""
    taken = {value for value in config.to_dict().values() if isinstance(value, int)}
    taken |= {config.d_model // value for value in taken if value}  # widths of heads
    short, long = [length for length in (5, 7, 11, 13, 17, 19, 23) if length not in taken][:2]
    return short, long


def free_axes(tensor: torch.Tensor, lengths: dict[int, Any], batch: Any) -> dict[int, Any]:
    """The axes of a tensor that are free: the first, and those of the lengths given, which nothing else has here."""
    return {0: batch, **{axis: lengths[size] for axis, size in enumerate(tensor.shape) if axis and size in lengths}}


def export(
    graph: EncoderGraph | DecoderGraph | StepGraph, given: tuple[torch.Tensor, ...], names: Sequence[str], axes: Any
) -> Any:
    """A graph as a program of ONNX, without inputs that it does not read."""
    try:
        with quiet_exporter():
            program: Any = torch.onnx.export(
                graph.eval(), given, input_names=list(names), dynamic_shapes=axes, dynamo=True, verbose=False
            )
    except Exception as error:  # whatever the exporter meets
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(
            f"torch's exporter cannot follow this model's {type(graph).__name__} ({shorten(str(cause))}). Remedy: "
            "another release of torch and onnxscript, or run the model with `recnmt translate` (--quantization int8)."
        ) from error
    inner = program.model.graph
    for value in [value for value in inner.inputs if not value.uses()]:
        inner.inputs.remove(value)
    for value, name in zip(inner.outputs, graph.names, strict=True):
        value.name = name
    return program


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Without the exporter's words on packages that are not there and names that change."""
    loggers = [logging.getLogger(f"torch.onnx._internal.exporter.{name}") for name in ("_registration", "_schemas")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def save_graphs(programs: dict[str, Any], folder: Path) -> None:
    """The graphs, and one file with the weights of all of them, each once."""
    import onnx_ir  # of onnxscript

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
                    file.write(b"\0" * (-file.tell() % PAGE))
                    places[key] = (file.tell(), len(raw))
                    file.write(raw)
                offset, length = places[key]
                value.const_value = onnx_ir.ExternalTensor(
                    WEIGHTS,
                    offset,
                    length,
                    tensor.dtype,
                    shape=tensor.shape,
                    name=value.name,
                    base_dir=str(folder),
                )
    for name in GRAPHS:
        forget_origins(programs[name].model)
        onnx_ir.save(programs[name].model, folder / name)


def forget_origins(model: Any) -> None:
    """Removes what the exporter notes of where in the code each node comes from, paths of this machine among it."""
    graphs = [model.graph, *(function for function in model.functions.values())]
    for graph in graphs:
        graph.metadata_props.clear()
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
    model.metadata_props.clear()


@torch.no_grad()
def check_same(model: Any, graphs: OnnxModel) -> None:
    """
    Raises `UserError` where the graphs give other logits than the model, for other sentences than they saw: by more
    than rounding, which is measured on the model itself where it is large.
    """
    rows = min(model.config.vocab_size, model.config.decoder_vocab_size)
    for batch, source, words in ((4, 9, 4), (1, 1, 1), (2, 3, 2)):
        input_ids = (torch.arange(batch * source) * 13).view(batch, source) % rows
        attention_mask = torch.ones_like(input_ids)
        attention_mask[0, max(source // 2, 1) :] = 0
        target = (torch.arange(batch * (words + 3)) * 7).view(batch, -1) % rows
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        first = graphs(**given, decoder_input_ids=target[:, :words], use_cache=True)
        rest = graphs(decoder_input_ids=target[:, words:], past_key_values=first.past_key_values)
        found = torch.cat([first.logits, rest.logits], 1)
        given["decoder_input_ids"] = target
        expected = model(**given, use_cache=False).logits
        distance, allowed = float((found - expected).abs().max()), TOLERANCE * max(1.0, float(expected.abs().max()))
        if not distance <= allowed:
            exact = copy.deepcopy(model).double()(**given, use_cache=False).logits
            allowed = max(allowed, ROUNDING * float((exact - expected).abs().max()))
        if not distance <= allowed:
            raise UserError(
                f"The graphs give other logits than the model (by {distance:.2g}), so they were not written. Remedy: "
                "another release of torch, onnxscript and onnxruntime; this one makes wrong graphs of the model."
            )
