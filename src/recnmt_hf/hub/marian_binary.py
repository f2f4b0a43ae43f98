"""Read and write the files in which Marian stores a model: `.npz`, and the binary format of `marian-conv`."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .._bounded_reading import MAX_BYTES, read_bounded
from .._loading_errors import remove_remedy, shorten
from ..data.text import is_url, open_bytes
from ..errors import UserError, short_repr
from ..training.recipe_yaml import load_yaml


# Array with the settings of the model, as YAML text that ends in a NUL.
SETTINGS = "special:model.yml"
MAX_SETTINGS = 2**16  # bytes; the parser needs seconds for more
VERSION = 1
# Marian allocates items in multiples of this.
ALIGNMENT = 256
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


@dataclass(frozen=True)
class MarianFile:
    """Content of a model's file."""

    arrays: dict[str, np.ndarray]  # in float32, without scales of 8-bit arithmetic
    settings: dict[str, Any]
    is_quantized: bool  # whether the file has 8-bit matrices


def read_marian_file(path: str | Path) -> MarianFile:
    """
    Read a model of Marian, a `.npz` file or a binary file; the content decides which. No code in the file is run.

    Raises:
        UserError: The file is missing, damaged or not a model, or has arrays of types that depend on the processor.
    """
    with open_bytes(path) as file:
        content = read_bounded(file, str(path), most_bytes(2**30 if is_url(path) else Path(path).stat().st_size))
    is_archive = content.startswith(b"PK")
    arrays, is_quantized = (read_npz if is_archive else read_binary)(content, str(path))
    settings = arrays.pop(SETTINGS, None)
    if settings is None:
        raise UserError(
            f"{path} has no settings (special:model.yml), so it is not a model of Marian. Pass model.npz, not the "
            "state of the optimizer.",
            field=path,
        )
    floats = {}
    for name, array in arrays.items():
        if array.dtype not in (np.float32, np.float16):
            raise UserError(
                f"the array {name[:60]} has the type {short_repr(str(array.dtype))}, which is not supported or "
                "depends on the processor. Pass the .npz file, or convert that with marian-conv --gemm-type float32 "
                "or intgemm8.",
                field=path,
            )
        if not name.endswith(INPUT_SCALE):
            floats[name] = array.astype(np.float32)
    return MarianFile(floats, parse_settings(settings.tobytes(), str(path)), is_quantized)


def most_bytes(size: int) -> int:
    """Return the most bytes to which a model of `size` bytes may expand."""
    return MAX_BYTES + MAX_EXPANSION * size


def parse_settings(content: bytes, path: str) -> dict[str, Any]:
    """Return settings from the bytes of YAML text: names with numbers, words, or lists of these."""
    try:
        if len(content) > MAX_SETTINGS:
            raise ValueError("too long")
        settings = load_yaml(content.split(b"\0")[0].decode("utf-8"), path)
        if not isinstance(settings, dict):
            raise ValueError("expected names with values")
        for name, value in settings.items():
            values = value if isinstance(value, list) else [value]
            if any(isinstance(one, (list, dict)) or one in (math.inf, -math.inf) or one != one for one in values):
                raise ValueError(f"the value of {name[:60]} is neither a number nor a word")
    except ValueError as error:
        reason = "its settings are not valid YAML: " + remove_remedy(error)
        raise UserError(f"{path} is not an intact model of Marian ({reason}).", field=path) from error
    return settings


# -- .npz --------------------------------------------------------------------------------------------------------------


def read_npz(content: bytes, path: str) -> tuple[dict[str, np.ndarray], bool]:
    """Read all arrays of a `.npz` file."""
    arrays = {}
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            if sum(entry.file_size for entry in archive.zip.infolist()) > most_bytes(len(content)):
                raise ValueError("its arrays are much larger than the file")
            for name in archive.files:
                if name in arrays:
                    raise ValueError(f"two arrays have the name {name}")
                arrays[name] = archive[name]
                if not isinstance(arrays[name], np.ndarray):  # bytes of another file
                    raise ValueError(f"{name} is not an array")
    except Exception as error:  # numpy, zipfile and zlib raise errors of many kinds about damaged files
        raise UserError(
            f"{path} is not an intact model of Marian ({shorten(str(error) or type(error).__name__)}).", field=path
        ) from error
    return arrays, False


def npz_content(arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> bytes:
    """Return the content of the file in which Marian saves a model."""
    text, file = yaml.safe_dump(dict(settings), default_flow_style=False, width=math.inf) + "\0", io.BytesIO()
    content: dict[str, Any] = {SETTINGS: np.frombuffer(text.encode(), dtype=np.int8), **arrays}
    np.savez(file, **content)
    return file.getvalue()


# -- binary format -----------------------------------------------------------------------------------------------------


class Reader:
    """Reads numbers and bytes from the start of a file, and raises `ValueError` at its end."""

    def __init__(self, content: bytes):
        self.content, self.place = memoryview(content), 0

    def take(self, size: int) -> memoryview:
        """Return the next bytes."""
        if not 0 <= size <= len(self.content) - self.place:
            raise ValueError("it is truncated")
        self.place += size
        return self.content[self.place - size : self.place]

    def numbers(self, count: int, kind: str = "Q") -> tuple[int, ...]:
        """Return the next integers, of a type of `struct`."""
        layout = f"<{count}{kind}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))


def read_binary(content: bytes, path: str) -> tuple[dict[str, np.ndarray], bool]:
    """
    Read all items of the binary format; little endian: version, number of items, four numbers for each (length of its
    name, type, number of dimensions, length of its data), names, shapes, padding, data.
    """
    reader, arrays, is_quantized = Reader(content), {}, False
    try:
        (version,) = reader.numbers(1)
        if version != VERSION:
            raise ValueError(f"it is neither a .npz file nor version {VERSION} of the binary format")
        (count,) = reader.numbers(1)
        headers = [reader.numbers(4) for _ in range(count)]
        names = [bytes(reader.take(header[0])).removesuffix(b"\0").decode("utf-8") for header in headers]
        shapes = [reader.numbers(header[2], "i") for header in headers]
        reader.take(reader.numbers(1)[0])
        for name, (_, kind, _, length), shape in zip(names, headers, shapes, strict=True):
            data = reader.take(length)
            if name in arrays:
                raise ValueError(f"two items have the name {name}")
            is_embedding = "Wemb" in name
            if kind in QUANTIZED_TYPES and len(shape) == 2 and (is_embedding or not any(n % BLOCK for n in shape)):
                arrays[name], is_quantized = dequantized(name, data, shape, is_embedding), True
            elif kind in PLAIN_TYPES:
                arrays[name] = array_of(data, PLAIN_TYPES[kind], shape)
            else:
                raise UserError(
                    f"the array {name[:60]} has the type {short_repr(f'0x{kind:x} {shape}')}, which is not supported "
                    "or depends on the processor. Pass the .npz file, or convert that with marian-conv --gemm-type "
                    "float32 or intgemm8.",
                    field=path,
                )
    except UserError:
        raise
    except (ValueError, struct.error) as error:  # from struct or numpy about an impossible shape
        raise UserError(f"{path} is not an intact model of Marian ({error}).", field=path) from error
    return arrays, is_quantized


def array_of(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], more: int = 0) -> np.ndarray:
    """Return an array from an item's data: its values, `more` bytes, and padding."""
    size = math.prod(shape)
    needed = size * dtype.itemsize + more
    if len(data) not in (needed, -(-needed // ALIGNMENT) * ALIGNMENT):
        raise ValueError(f"an item of the shape {shape} has {len(data)} bytes instead of {needed}")
    return np.frombuffer(data, dtype, count=size).reshape(shape)


def dequantized(name: str, data: memoryview, shape: tuple[int, ...], is_embedding: bool) -> np.ndarray:
    """
    Return a matrix of 8-bit integers as float32: they are divided by the number that follows them. Matrices are stored
    by columns, embeddings (in the forks only) by rows.
    """
    integers = array_of(data, np.dtype("i1"), shape if is_embedding else shape[::-1], more=4)
    (multiplier,) = struct.unpack_from("<f", data, integers.size)
    if not (math.isfinite(multiplier) and multiplier > 0):
        raise ValueError(f"the scale of {name} is {multiplier}")
    return (integers if is_embedding else integers.T) / np.float32(multiplier)
