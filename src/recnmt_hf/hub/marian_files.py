"""Conversion of Marian's own files, `.npz` and `.bin`, to base Transformers and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from transformers import GenerationConfig, MarianTokenizer, PreTrainedTokenizerBase

from .._loading_errors import read_bounded
from ..data.files import open_output, open_output_folder
from ..data.languages import list_names
from ..data.text import open_bytes
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError, packages_of_extra
from ..inference.backends.torch_model import check_weights
from ..inference.model_settings import start_id
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.modeling_nmt_transformer import NMTTransformerForConditionalGeneration
from ..training.processes import logger
from .checked_copy import load_checked
from .marian import save_imported
from .marian_format import (
    FURTHER,
    OLD_OUTPUT,
    OUTPUT,
    OUTPUT_BIAS,
    npz_content,
    parse_settings,
    places_of,
    read_marian_file,
)
from .marian_settings import IMPORTED_SETTINGS, WITHOUT_EFFECT, Settings, check_function, settings_of


PADDING = "<pad>"
# The byte of a line break, in SentencePiece models with byte fallback.
NEWLINE = "<0x0A>"


def import_marian_file(
    source: str | Path,
    vocabularies: Sequence[str | Path],
    output: str | Path,
    search_settings: str | Path | None = None,
) -> Path:
    """
    Convert a Transformer in Marian's own format into a base Transformer with tokenizers and generation settings. It
    computes the same function. The decoder of Marian starts from a zero vector, here the embedding of a padding token
    that is added to the vocabulary. 8-bit weights are converted to float32; a message reports it.

    Args:
        source (`str` or `Path`): A `.npz` file, or a `.bin` file with weights in float32, float16 or generic 8-bit
            integers (intgemm8), of a Transformer whose decoder has self-attention, SSRUs or average attention.
        vocabularies (two of `str` or `Path`): SentencePiece models (`.spm`) of source and target; may be one file.
        output (`str` or `Path`): A new folder, which is returned.
        search_settings (`str` or `Path`, *optional*): A YAML file for marian-decoder. Its beam size, length penalty and
            `allow-unk` become generation settings. Without it: greedy search without unknown tokens.

    Returns:
        `Path`: The folder of the model.

    Raises:
        UserError: A file is missing, damaged, or of another program; a setting or an array is not supported; or the
            files do not belong together. Nothing is written.
        FileExistsError: The output exists and is not empty.
    """

    def content_of(path: str | Path) -> bytes:
        with open_bytes(path) as opened:
            return read_bounded(opened, str(path))

    file, path = read_marian_file(source), str(source)
    settings = search = Settings(file.settings, path)
    if search_settings is not None:
        own = parse_settings(content_of(search_settings), str(search_settings))
        search = Settings({**file.settings, **own}, str(search_settings), WITHOUT_EFFECT)
    pieces = [parse_pieces(content_of(vocabulary), str(vocabulary)) for vocabulary in vocabularies]
    is_shared = settings.fields()["share_encoder_decoder_embeddings"]
    controls = [(side.symbols[side.end], side.symbols[side.unknown]) for side in pieces]
    if (is_shared and pieces[0].content != pieces[1].content) or controls[0] != controls[1]:
        raise UserError(
            f"{pieces[1].path} and {pieces[0].path} do not belong to one model: their end or unknown tokens have other "
            "names, or the model has one vocabulary for both sides.",
            field=pieces[1].path,
        )
    model = build_model(file.arrays, settings, pieces)
    model.generation_config = generation_settings(search, model.config, pieces[1])
    with open_output_folder(output, must_be_new=True) as working, TemporaryDirectory() as folder:
        made = [make_tokenizer(side, model.config, f"{folder}/{i}") for i, side in enumerate(pieces)]
        save_imported(model, TokenizerPair(made[0], None if is_shared else made[1]), working)
    if file.is_quantized:
        logger.info(
            f"{path} has 8-bit weights, which were converted to float32. Marian also quantizes activations, so that "
            "its translations may differ where two have nearly equal scores."
        )
    logger.info(
        f"To translate with Marian's settings: recnmt translate {output} --beams {search['beam-size']} "
        f"--length-penalty-type hf --length-penalty {search['normalize']:g} --max-length-extra 0 "
        f"--max-length-factor {search['max-length-factor']:g}"
    )
    return Path(output)


def generation_settings(search: Settings, config: NMTTransformerConfig, target: Pieces) -> GenerationConfig:
    """Return the settings of `generate` that correspond to those of Marian's search."""
    beams = search["beam-size"]
    penalty = {"length_penalty": float(search["normalize"])} if beams > 1 else {}
    ids = {name: getattr(config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    suppressed = [] if search["allow-unk"] else [target.unknown]
    if NEWLINE in target.symbols and not search["allow-special"]:
        suppressed.append(target.symbols.index(NEWLINE))
    settings = {"num_beams": beams, "max_length": config.max_position_embeddings, "suppress_tokens": suppressed or None}
    return GenerationConfig(**settings, **penalty, **ids)


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
        IMPORTED_SETTINGS: dict(settings.values),
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
        raise UserError(
            f"{settings.path} does not have the arrays of its settings and vocabularies: {list_names(differing)} "
            "are missing, unknown or of another shape.",
            field=settings.path,
        )
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

    Returns:
        `Path`: The `.npz` file.

    Raises:
        UserError: Marian does not support the model or its tokenizers, or the files are damaged.
    """
    output = Path(output)
    model, tokenizers = load_checked(source, **kwargs)
    check_function(model.config)
    pieces = pieces_of(tokenizers)
    sizes = [len(vocabulary.symbols) for vocabulary in pieces]
    state, start = model.state_dict(), start_id(model)
    if start < sizes[1] or state["model.decoder.embed_tokens.weight"][start].any():
        raise UserError(
            f"Marian starts from a zero vector, but decoder_start_token_id={start} has an embedding or is a symbol of "
            "the vocabulary. Export a model that was imported from Marian's own files, or fine-tuned from one with "
            "training.label_smoothing_factor=0.",
            field="decoder_start_token_id",
        )
    imported, bias = getattr(model.config, IMPORTED_SETTINGS, None) or {}, state.get("final_logits_bias")
    omits_bias = imported.get("output-omit-bias", not imported)
    has_bias = bias is not None and bool(not omits_bias or bias[:, : sizes[1]].any())
    arrays: dict[str, np.ndarray] = {}
    for place in places_of(model.config, has_bias):
        for name, view in zip(place.arrays, place.views(state[place.parameter], sizes), strict=True):
            arrays[name] = np.ascontiguousarray(view.float().cpu().numpy())  # Marian reads only the order of C
    generation = model.generation_config
    sides = ["vocab"] if pieces[0].content == pieces[1].content else ["source", "target"]
    names = [f"{output.stem}.{side}.spm" for side in sides]
    search = {
        "relative-paths": True,
        "models": [output.name],
        "vocabs": [names[0], names[-1]],
        "beam-size": generation.num_beams or 1,
        "normalize": 1.0 if generation.length_penalty is None else float(generation.length_penalty),
        "allow-unk": pieces[1].unknown not in (generation.suppress_tokens or []),
    }
    contents = {name: vocabulary.content for name, vocabulary in zip(names, pieces, strict=False)}
    contents[f"{output.stem}.decoder.yml"] = yaml.safe_dump(search, sort_keys=False).encode()
    contents[output.name] = npz_content(
        dict(sorted(arrays.items())), settings_of(model.config, (sizes[0], sizes[1]), has_bias)
    )
    for name, content in contents.items():
        with open_output(output.parent / name, binary=True) as file:
            file.write(content)
    return output


# -- vocabularies -----------------------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """A SentencePiece model: its file, its content, its symbols by id, and the ids of end and unknown token."""

    path: str
    content: bytes
    symbols: list[str]
    end: int
    unknown: int


def parse_pieces(content: bytes, path: str) -> Pieces:
    """Return a SentencePiece model from its content."""
    with packages_of_extra("marian", "Marian's vocabulary"):
        from sentencepiece import SentencePieceProcessor
    try:
        model = SentencePieceProcessor(model_proto=content)
        symbols = [model.IdToPiece(i) for i in range(model.GetPieceSize())]
        if min(model.eos_id(), model.unk_id()) < 0 or len({PADDING, *symbols}) <= len(symbols):
            raise ValueError(f"no end token, no unknown token, two equal symbols, or {PADDING}")
    except Exception as error:  # sentencepiece does not name the file
        raise UserError(f"{path} is not a SentencePiece model of Marian: {error}.", field=path) from error
    return Pieces(path, content, symbols, model.eos_id(), model.unk_id())


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
            raise UserError(
                f"The {side} tokenizer has other ids than its SentencePiece model, so Marian cannot use it. Export a "
                "model that was imported from Marian's own files.",
                field=f"{side} tokenizer",
            )
        pieces.append(vocabulary)
    return pieces
