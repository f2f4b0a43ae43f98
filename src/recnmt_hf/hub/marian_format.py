"""Files in which Marian stores a model, and the parameters that its arrays become."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from .._loading_errors import MAX_BYTES, read_bounded, shorten
from ..data.text import is_url, open_bytes
from ..errors import UserError
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.seq2seq_loss import FORBIDDEN
from ..training.recipe_yaml import load_yaml


# Array with the settings of the model, as YAML text that ends in a NUL.
SETTINGS = "special:model.yml"
MAX_SETTINGS = 2**16  # bytes; the parser needs seconds for more
VERSION = 1
# Types of items in the binary format that do not depend on the processor, with those of numpy.
PLAIN_TYPES: dict[int, np.dtype[Any]] = {0x404: np.dtype("<f4"), 0x402: np.dtype("<f2"), 0x101: np.dtype("i1")}
# 8-bit matrices: of marian-nmt/marian-dev, and of the forks of browsermt and Mozilla.
QUANTIZED_TYPES = (0x10001, 0x4101)
# Marian transposes a matrix in blocks of this size before it rounds it, and mixes up one that has other dimensions.
BLOCK = 16
# Weights are hardly compressible; a file that expands to more times its size is made to fill the memory.
MAX_EXPANSION = 8
# Endings of arrays with the scale of a layer's input, for arithmetic in 8 bits.
INPUT_SCALE = "_QuantMultA"
CONVERSION = "Pass the .npz file, or convert that with marian-conv --gemm-type float32 or intgemm8"
# The output matrix, now and in older releases of Marian, where it is transposed.
OUTPUT, OLD_OUTPUT = "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W"
OUTPUT_BIAS = "decoder_ff_logit_out_b"
# Values of a parameter for symbols that Marian does not have.
FURTHER = {"table": 0.0, "biases": FORBIDDEN}
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarianFile:
    """Content of a model's file."""

    arrays: dict[str, np.ndarray]  # in float32, without scales of 8-bit arithmetic
    settings: dict[str, Any]
    is_quantized: bool  # whether the file has 8-bit matrices


def read_marian_file(path: str | Path) -> MarianFile:
    """Read a model of Marian, a `.npz` file or a binary file by its content. No code in the file is run."""
    with open_bytes(path) as file:
        content = read_bounded(file, str(path), most_bytes(2**30 if is_url(path) else Path(path).stat().st_size))
    arrays: dict[str, np.ndarray] = {}
    settings, is_quantized = b"", False
    try:
        for name, array, is_rounded in read_npz(content) if content.startswith(b"PK") else read_binary(content):
            if name == SETTINGS:
                settings = array.tobytes()
            elif name in arrays or array.dtype not in (np.float32, np.float16):
                raise ValueError(f"the array {name[:60]} is there twice, or has the type {array.dtype}. {CONVERSION}")
            elif not name.endswith(INPUT_SCALE):
                arrays[name] = array.astype(np.float32)
            is_quantized |= is_rounded
    except Exception as error:  # numpy, zipfile, zlib and struct raise errors of many kinds without the file's name
        reason = shorten(str(error) or type(error).__name__)
        raise UserError(f"{path} is not an intact model of Marian: {reason}.", field=path) from error
    return MarianFile(arrays, parse_settings(settings, str(path)), is_quantized)


def most_bytes(size: int) -> int:
    """Return the most bytes to which a model of `size` bytes may expand."""
    return MAX_BYTES + MAX_EXPANSION * size


def parse_settings(content: bytes, path: str) -> dict[str, Any]:
    """Return settings from the bytes of YAML text, which may end in a NUL."""
    settings = None
    if len(content) <= MAX_SETTINGS:
        settings = load_yaml(content.split(b"\0")[0].decode("utf-8", "replace"), path)
    if not isinstance(settings, dict):
        raise UserError(f"{path} must have settings ({SETTINGS}), of at most {MAX_SETTINGS} bytes.", field=path)
    return settings


def read_npz(content: bytes) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Yield names and arrays of a `.npz` file, and `False`: none is rounded."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        if sum(entry.file_size for entry in archive.zip.infolist()) > most_bytes(len(content)):
            raise ValueError("its arrays are much larger than the file")
        for name in archive.files:
            yield name, archive[name], False


def npz_content(arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> bytes:
    """Return the content of the file in which Marian saves a model."""
    text, file = yaml.safe_dump(dict(settings), default_flow_style=False, width=math.inf) + "\0", io.BytesIO()
    content: dict[str, Any] = {SETTINGS: np.frombuffer(text.encode(), dtype=np.int8), **arrays}
    np.savez(file, **content)
    return file.getvalue()


def read_binary(content: bytes) -> Iterator[tuple[str, np.ndarray, bool]]:
    """
    Yield names and arrays of the binary format, and whether they were rounded to 8 bits. Little endian: version, number
    of items, four numbers for each (length of its name, type, number of dimensions, length of its data), names, shapes,
    padding, data.
    """
    left = memoryview(content)

    def take(size: int) -> memoryview:
        nonlocal left
        taken, left = left[:size], left[size:]
        return taken

    def numbers(count: int, kind: str = "Q") -> tuple[int, ...]:
        layout = f"<{count}{kind}"
        return struct.unpack(layout, take(struct.calcsize(layout)))

    (version,) = numbers(1)
    if version != VERSION:
        raise ValueError(f"it is neither a .npz file nor version {VERSION} of the binary format")
    headers = [numbers(4) for _ in range(*numbers(1))]
    names = [bytes(take(header[0])).removesuffix(b"\0").decode("utf-8") for header in headers]
    shapes = [numbers(header[2], "i") for header in headers]
    take(*numbers(1))
    for name, (_, kind, _, length), shape in zip(names, headers, shapes, strict=True):
        data, size, is_embedding = take(length), math.prod(shape), "Wemb" in name
        is_rounded = kind in QUANTIZED_TYPES
        is_mixed_up = is_rounded and (len(shape) != 2 or (not is_embedding and any(n % BLOCK for n in shape)))
        if is_mixed_up or not (is_rounded or kind in PLAIN_TYPES):
            raise ValueError(f"the array {name[:60]} has the type 0x{kind:x} and the shape {shape}. {CONVERSION}")
        dtype = np.dtype("i1") if is_rounded else PLAIN_TYPES[kind]
        # 8-bit matrices are stored by columns, embeddings (in the forks only) by rows.
        is_transposed = is_rounded and not is_embedding
        array = np.frombuffer(data, dtype, count=size).reshape(shape[::-1] if is_transposed else shape)
        if is_rounded:  # integers are divided by the number that follows them
            (multiplier,) = struct.unpack_from("<f", data, size)
            array = (array.T if is_transposed else array) / np.float32(multiplier)
        yield name, array, is_rounded


# -- parameters --------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """
    Arrays of Marian and the parameter that they become. Kinds: `"matrix"` is transposed, and several become its rows;
    `"vector"` has one row in Marian; `"table"` and `"biases"` have an entry for each symbol, and further ones here.
    """

    arrays: tuple[str, ...]
    parameter: str
    kind: str

    def views(self, parameter: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return views of a parameter with the shapes of Marian's arrays; `sizes` are those of the vocabularies."""
        size = sizes[self.arrays[0] != "encoder_Wemb"]  # all tables but one belong to the target
        if self.kind == "matrix":
            return [part.T for part in parameter.chunk(len(self.arrays))]
        if self.kind == "vector":
            return [parameter[None]]
        return [parameter[:size] if self.kind == "table" else parameter[:, :size]]


def linear(prefix: str, module: str, **maps: str) -> list[Place]:
    """Return the places of linear layers; `maps` are the ends of Marian's names, and the layers within a module."""
    return [
        Place((f"{prefix}_{array}{end}",), f"{module}{layer}.{name}", kind)
        for end, layer in maps.items()
        for array, name, kind in (("W", "weight", "matrix"), ("b", "bias", "vector"))
    ]


def norm(prefix: str, module: str, ending: str = "") -> list[Place]:
    """Return the places of a layer norm."""
    names = {"scale": "weight", "bias": "bias"}
    return [Place((f"{prefix}_ln_{name}{ending}",), f"{module}.{own}", "vector") for name, own in names.items()]


def places_of(config: NMTTransformerConfig, has_bias: bool = True) -> Iterator[Place]:
    """Yield the places of all parameters of a model."""
    if config.share_encoder_decoder_embeddings:
        tables = {"Wemb": "model.shared"}
    else:
        tables = {f"{side}_Wemb": f"model.{side}.embed_tokens" for side in ("encoder", "decoder")}
    if not config.tie_word_embeddings:
        tables[OUTPUT] = "lm_head"
    yield from (Place((array,), f"{module}.weight", "table") for array, module in tables.items())
    if has_bias:
        yield Place((OUTPUT_BIAS,), "final_logits_bias", "biases")
    ending = "_pre" if config.normalize_before else ""
    for side in ("encoder", "decoder"):
        for i in range(getattr(config, f"{side}_layers")):
            prefix, layer = f"{side}_l{i + 1}", f"model.{side}.layers.{i}."
            kind = "self_attention" if side == "encoder" else config.decoder_autoregression
            if kind == "self_attention":
                yield from linear(f"{prefix}_self", f"{layer}self_attn.", **ATTENTION)
                normed = f"{prefix}_self_Wo"
            elif kind == "ssru":
                rnn, module = f"{prefix}_rnn", f"{layer}self_attn."
                yield Place((f"{rnn}_W", f"{rnn}_Wf"), f"{module}in_proj.weight", "matrix")
                yield Place((f"{rnn}_bf",), f"{module}forget_bias", "vector")
                if config.decoder_recurrence_projection:
                    yield from linear(rnn, module, o="out_proj")
                # Marian names the norm after the sub-layer `_rnn_ffn`, the one before it `_rnn`.
                normed = rnn if ending else f"{rnn}_ffn"
            else:
                maps = {str(number): f"fc{number}" for number in range(1, 1 + config.aan_ffn_layers * config.aan_ffn)}
                if config.aan_gate == "separate":
                    maps |= {"i": "input_gate", "f": "forget_gate"}
                yield from linear(f"{prefix}_aan", f"{layer}self_attn.", **maps)
                normed = f"{prefix}_aan_ffn"
            yield from norm(normed, f"{layer}self_attn_layer_norm", ending)
            if side == "decoder":
                yield from linear(f"{prefix}_context", f"{layer}encoder_attn.", **ATTENTION)
                yield from norm(f"{prefix}_context_Wo", f"{layer}encoder_attn_layer_norm", ending)
            yield from linear(f"{prefix}_ffn", layer, **{"1": "fc1", "2": "fc2"})
            yield from norm(f"{prefix}_ffn_ffn", f"{layer}final_layer_norm", ending)
        if config.normalize_before:
            yield from norm(f"{side}_top", f"model.{side}.layer_norm")
