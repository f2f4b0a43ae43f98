"""Conversion of Marian's own files, `.npz` and `.bin`, to base Transformers and back."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from transformers import GenerationConfig, MarianTokenizer, PreTrainedTokenizerBase

from .._loading_errors import MAX_BYTES, read_bounded
from ..data.files import open_output, open_output_folder
from ..data.languages import list_names
from ..data.text import is_url, open_bytes
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError, explained, packages_of_extra
from ..inference.backends.torch_model import check_weights
from ..inference.model_settings import start_id
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.modeling_nmt_transformer import NMTTransformerForConditionalGeneration
from ..training.processes import logger
from ..training.recipe_yaml import load_yaml
from .checked_copy import load_checked
from .marian import save_imported
from .marian_settings import FURTHER, IMPORTED, OLD_OUTPUT, OUTPUT, OUTPUT_BIAS, Settings, places_of, settings_of


# The padding token, and the byte of a line break in SentencePiece models with byte fallback.
PADDING, NEWLINE = "<pad>", "<0x0A>"
SETTINGS = "special:model.yml"  # array with the settings of the model, as YAML text that ends in a NUL
# Types of items in the binary format that do not depend on the processor, with those of numpy.
PLAIN_TYPES: dict[int, np.dtype[Any]] = {0x404: np.dtype("<f4"), 0x402: np.dtype("<f2"), 0x101: np.dtype("i1")}
# 8-bit matrices: of marian-nmt/marian-dev, and of the forks of browsermt and Mozilla.
QUANTIZED_TYPES = (0x10001, 0x4101)
BLOCK = 16  # Marian transposes a matrix in such blocks before it rounds it, and mixes up one of other dimensions
MAX_EXPANSION = 8  # weights are hardly compressible; a file that expands more is made to fill the memory
CONVERSION = "Pass the .npz file, or convert that with marian-conv --gemm-type float32 or intgemm8"


def import_marian_file(
    source: str | Path,
    vocabularies: Sequence[str | Path],
    output: str | Path,
    search_settings: str | Path | None = None,
) -> Path:
    """
    Convert a Transformer in Marian's own format into a base Transformer with tokenizers and generation settings. It
    computes the same function. The decoder of Marian starts from a zero vector, here the embedding of a padding token
    that is added to the vocabulary. 8-bit weights become float32; Marian also quantizes activations, so that its own
    translations may differ where two have nearly equal scores.

    Args:
        source (`str` or `Path`): A `.npz` file, or a `.bin` file with weights in float32, float16 or generic 8-bit
            integers (intgemm8), of a Transformer whose decoder has self-attention, SSRUs or average attention.
        vocabularies (two of `str` or `Path`): SentencePiece models (`.spm`) of source and target; may be one file.
        output (`str` or `Path`): A new folder, which is returned.
        search_settings (`str` or `Path`, *optional*): A YAML file for marian-decoder. Its beam size, length penalty and
            `allow-unk` become generation settings. Without it: greedy search without unknown tokens.

    Raises:
        UserError: A file is missing, damaged, or of another program; a setting or an array is not supported; or the
            files do not belong together. Nothing is written.
        FileExistsError: The output exists and is not empty.
    """
    file, path = read_marian_file(source), str(source)
    settings = search = Settings(file.settings, path)
    if search_settings is not None:
        own = parse_settings(read_bytes(search_settings), str(search_settings))
        search = Settings({**file.settings, **own}, str(search_settings), is_search=True)
    pieces = [parse_pieces(read_bytes(vocabulary), str(vocabulary)) for vocabulary in vocabularies]
    is_shared = settings.fields()["share_encoder_decoder_embeddings"]
    controls = [(side.symbols[side.end], side.symbols[side.unknown]) for side in pieces]
    if (is_shared and pieces[0].content != pieces[1].content) or controls[0] != controls[1]:
        reason = "do not belong to one model: their control tokens differ, or it has one vocabulary for both sides"
        raise UserError(f"{vocabularies[1]} and {vocabularies[0]} {reason}.", field=vocabularies[1])
    model = build_model(file.arrays, settings, pieces)
    config, beams = model.config, search["beam-size"]
    suppressed = [] if search["allow-unk"] else [pieces[1].unknown]
    if NEWLINE in pieces[1].symbols and not search["allow-special"]:
        suppressed.append(pieces[1].symbols.index(NEWLINE))
    model.generation_config = GenerationConfig(
        num_beams=beams,
        max_length=config.max_position_embeddings,
        suppress_tokens=suppressed or None,
        **({"length_penalty": float(search["normalize"])} if beams > 1 else {}),
        **{name: getattr(config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")},
    )
    with open_output_folder(output, must_be_new=True) as working, TemporaryDirectory() as folder:
        made = [make_tokenizer(side, config, f"{folder}/{i}") for i, side in enumerate(pieces)]
        save_imported(model, TokenizerPair(made[0], None if is_shared else made[1]), working)
    logger.info(
        f"To translate with Marian's settings: recnmt translate {output} --beams {beams} "
        f"--length-penalty-type hf --length-penalty {search['normalize']:g} --max-length-extra 0 "
        f"--max-length-factor {search['max-length-factor']:g}"
    )
    return Path(output)


def build_model(
    arrays: Mapping[str, np.ndarray], settings: Settings, pieces: Sequence[Pieces]
) -> NMTTransformerForConditionalGeneration:
    """Return a model with these arrays; `UserError` unless all arrays are used and all parameters are filled."""
    sizes = [len(vocabulary.symbols) for vocabulary in pieces]
    fields: dict[str, Any] = {
        **settings.fields(),
        **dict.fromkeys(("vocab_size", "decoder_vocab_size"), max(sizes) + 1),
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), max(sizes)),
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
        "eos_token_id": pieces[1].end,
        "final_logits_bias": True,
        IMPORTED: dict(settings.values),
    }
    config = NMTTransformerConfig(**fields)
    arrays, omits_bias = {**arrays}, settings["output-omit-bias"]
    if OLD_OUTPUT in arrays and OUTPUT not in arrays:
        arrays[OUTPUT] = arrays.pop(OLD_OUTPUT).T
    places = list(places_of(config))
    with torch.device("meta"):  # wrong settings could ask for more memory than there is
        expected = NMTTransformerForConditionalGeneration(config).state_dict()
    needed = {
        name: tuple(view.shape)
        for place in places
        for name, view in zip(place.arrays, place.views(expected[place.parameter], sizes), strict=True)
        if not (omits_bias and name == OUTPUT_BIAS)
    }
    found = {name: array.shape for name, array in arrays.items()}
    if differing := sorted(name[:60] for name in needed | found if needed.get(name) != found.get(name)):
        reason = f"{list_names(differing)} are missing, unknown or contradict the settings and vocabularies"
        raise UserError(f"{settings.path}: {reason}.", field=settings.path)
    if omits_bias:
        arrays[OUTPUT_BIAS] = np.zeros((1, sizes[1]), np.float32)
    model = NMTTransformerForConditionalGeneration(config)
    state = model.state_dict()
    for place in places:
        parameter = state[place.parameter]
        if place.kind in FURTHER:
            parameter.fill_(FURTHER[place.kind])
        for name, view in zip(place.arrays, place.views(parameter, sizes), strict=True):
            view.copy_(torch.from_numpy(arrays[name]))
    filled = {*model.get_expanded_tied_weights_keys(), *(place.parameter for place in places)}
    assert filled == state.keys(), f"parameters differ: {filled ^ state.keys()}"
    check_weights(model)
    return model.eval()


def export_marian_file(source: str | Path, output: str | Path, **kwargs: Any) -> Path:
    """
    Save a base Transformer in Marian's own format. The arrays and settings of an imported file are restored. The
    activation `quick_gelu` is the `gelu` of Marian before v1.12.3.

    Args:
        source (`str` or `Path`): Folder or model id.
        output (`str` or `Path`): A file `NAME.npz`, which is returned. SentencePiece models (`NAME.vocab.spm`, or
            `NAME.source.spm` and `NAME.target.spm`) and `NAME.decoder.yml` for marian-decoder are written beside it.
        **kwargs: Those of `from_pretrained`, e.g. `revision=...`.

    Raises:
        UserError: Marian does not support the model or its tokenizers, or the files are damaged.
    """
    output = Path(output)
    model, tokenizers = load_checked(source, **kwargs)
    pieces = pieces_of(tokenizers)
    sizes = (len(pieces[0].symbols), len(pieces[1].symbols))
    state, start = model.state_dict(), start_id(model)
    if start < sizes[1] or state["model.decoder.embed_tokens.weight"][start].any():
        reason = f"decoder_start_token_id={start} has an embedding or is a symbol, but Marian starts from a zero vector"
        remedy = "Export a model that was imported from Marian, or fine-tuned from one without label smoothing"
        raise UserError(f"{reason}. {remedy}.", field="decoder_start_token_id")
    imported, bias = getattr(model.config, IMPORTED, None) or {}, state.get("final_logits_bias")
    omits_bias = imported.get("output-omit-bias", not imported)
    has_bias = bias is not None and bool(not omits_bias or bias[:, : sizes[1]].any())
    arrays: dict[str, Any] = {}
    for place in places_of(model.config, has_bias):
        for name, view in zip(place.arrays, place.views(state[place.parameter], sizes), strict=True):
            arrays[name] = np.ascontiguousarray(view.float().cpu().numpy())  # Marian reads only the order of C
    generation = model.generation_config
    sides = ["vocab"] if pieces[0].content == pieces[1].content else ["source", "target"]
    names = [f"{output.stem}.{side}.spm" for side in sides]
    search = {
        **{"relative-paths": True, "models": [output.name], "vocabs": [names[0], names[-1]]},
        "beam-size": generation.num_beams or 1,
        "normalize": 1.0 if generation.length_penalty is None else float(generation.length_penalty),
        "allow-unk": pieces[1].unknown not in (generation.suppress_tokens or []),
    }
    contents = {name: vocabulary.content for name, vocabulary in zip(names, pieces, strict=False)}
    contents[f"{output.stem}.decoder.yml"] = yaml.safe_dump(search, sort_keys=False).encode()
    settings = yaml.safe_dump(settings_of(model.config, sizes, has_bias), default_flow_style=False, width=math.inf)
    text: Any = np.frombuffer(f"{settings}\0".encode(), np.int8)
    np.savez(file := io.BytesIO(), **{SETTINGS: text, **dict(sorted(arrays.items()))})
    contents[output.name] = file.getvalue()
    for name, content in contents.items():
        with open_output(output.parent / name, binary=True) as written:
            written.write(content)
    return output


class MarianFile(NamedTuple):
    """Content of a model's file."""

    arrays: dict[str, np.ndarray]  # in float32, without scales of 8-bit arithmetic
    settings: dict[str, Any]


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a file or URL of at most `most` bytes; `UserError` for a larger one."""
    with open_bytes(path) as file:
        return read_bounded(file, str(path), most)


def read_marian_file(path: str | Path) -> MarianFile:
    """Read a model of Marian, a `.npz` file or a binary file by its content. No code in the file is run."""
    content = read_bytes(path, MAX_BYTES + MAX_EXPANSION * (2**30 if is_url(path) else Path(path).stat().st_size))
    arrays, settings = dict[str, np.ndarray](), b""
    with explained(f"{path} is not an intact model of Marian", path):
        for name, array in read_npz(content) if content.startswith(b"PK") else read_binary(content):
            if name == SETTINGS:
                settings = array.tobytes()
            elif name in arrays or array.dtype not in (np.float32, np.float16):
                raise ValueError(f"the array {name[:60]} is there twice, or has the type {array.dtype}. {CONVERSION}")
            elif not name.endswith("_QuantMultA"):  # the scale of a layer's input, for arithmetic in 8 bits
                arrays[name] = array.astype(np.float32)
    return MarianFile(arrays, parse_settings(settings, str(path)))


def parse_settings(content: bytes, path: str) -> dict[str, Any]:
    """Return settings from the bytes of YAML text, which may end in a NUL."""
    is_short = len(content) <= 2**16  # the parser needs seconds for more
    settings = load_yaml(content.split(b"\0")[0].decode("utf-8", "replace"), path) if is_short else None
    if not isinstance(settings, dict):
        raise UserError(f"{path} must have settings ({SETTINGS}), of at most {2**16} bytes.", field=path)
    return settings


def read_npz(content: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays of a `.npz` file."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        if sum(entry.file_size for entry in archive.zip.infolist()) > MAX_BYTES + MAX_EXPANSION * len(content):
            raise ValueError("its arrays are much larger than the file")
        yield from archive.items()


def read_binary(content: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays of the binary format."""
    # Little endian: version, number of items, four numbers for each (length of its name, type, number of dimensions,
    # length of its data), names, shapes, padding, data.
    file = io.BytesIO(content)

    def numbers(count: int, kind: str = "Q") -> tuple[int, ...]:
        layout = f"<{count}{kind}"
        return struct.unpack(layout, file.read(struct.calcsize(layout)))

    version, count = numbers(2)
    if version != 1:
        raise ValueError("it is neither a .npz file nor version 1 of the binary format")
    headers = [numbers(4) for _ in range(count)]
    names = [file.read(header[0]).removesuffix(b"\0").decode("utf-8") for header in headers]
    shapes = [numbers(header[2], "i") for header in headers]
    file.read(*numbers(1))
    for name, (_, kind, _, length), shape in zip(names, headers, shapes, strict=True):
        data, size, is_embedding = file.read(length), math.prod(shape), "Wemb" in name
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
        yield name, array


class Pieces(NamedTuple):
    """A SentencePiece model: its content, its symbols by id, and the ids of end and unknown token."""

    content: bytes
    symbols: list[str]
    end: int
    unknown: int


def parse_pieces(content: bytes, path: str) -> Pieces:
    """Return a SentencePiece model from its content."""
    with packages_of_extra("marian", "Marian's vocabulary"):
        from sentencepiece import SentencePieceProcessor
    with explained(f"{path} is not a SentencePiece model of Marian", path):
        model = SentencePieceProcessor(model_proto=content)
        symbols = [model.IdToPiece(i) for i in range(model.GetPieceSize())]
        if min(model.eos_id(), model.unk_id()) < 0 or len({PADDING, *symbols}) <= len(symbols):
            raise ValueError(f"no end token, no unknown token, two equal symbols, or {PADDING}")
    return Pieces(content, symbols, model.eos_id(), model.unk_id())


def make_tokenizer(pieces: Pieces, config: NMTTransformerConfig, place: str) -> PreTrainedTokenizerBase:
    """Return MarianMT's tokenizer with this vocabulary, whose files are written to a place."""
    spm, vocabulary = Path(f"{place}.spm"), Path(f"{place}.json")
    spm.write_bytes(pieces.content)
    further = [f"<row {i}>" for i in range(len(pieces.symbols), config.vocab_size - 1)]
    symbols = {symbol: i for i, symbol in enumerate([*pieces.symbols, *further, PADDING])}
    vocabulary.write_text(json.dumps(symbols, ensure_ascii=False), encoding="utf-8")
    return MarianTokenizer(
        *(str(spm), str(spm), str(vocabulary)),
        unk_token=pieces.symbols[pieces.unknown],
        eos_token=pieces.symbols[pieces.end],
        pad_token=PADDING,
        model_max_length=config.max_position_embeddings,
    )


def pieces_of(tokenizers: TokenizerPair) -> list[Pieces]:
    """Return the SentencePiece models of a model's tokenizers; `UserError` if Marian cannot use them."""
    pieces = []
    for tokenizer, side in zip(tokenizers, ("source", "target"), strict=True):
        model = getattr(tokenizer, f"spm_{side}", None)
        content = b"" if model is None else model.serialized_model_proto()
        vocabulary, ids = parse_pieces(content, f"{side} tokenizer"), tokenizer.get_vocab()
        if [ids.get(symbol) for symbol in vocabulary.symbols] != list(range(len(vocabulary.symbols))):
            reason = "has other ids than its SentencePiece model. Export a model that was imported from Marian"
            raise UserError(f"The {side} tokenizer {reason}.", field=f"{side} tokenizer")
        pieces.append(vocabulary)
    return pieces
