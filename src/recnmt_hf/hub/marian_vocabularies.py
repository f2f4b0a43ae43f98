"""SentencePiece models of Marian, and the tokenizers of MarianMT that contain them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .._bounded_reading import read_bounded
from .._extras import packages_of_extra
from ..data.text import open_bytes
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from .marian import save_tokenizers
from .marian_settings import Settings


PADDING = "<pad>"


class Pieces(NamedTuple):
    """A SentencePiece model: its file, its content, its symbols by id, and the ids of end and unknown token."""

    path: str
    content: bytes
    symbols: list[str]
    end: int
    unknown: int


def read_pieces(path: str | Path) -> Pieces:
    """Read a SentencePiece model, as [`parse_pieces`]."""
    with open_bytes(path) as file:
        return parse_pieces(read_bounded(file, str(path)), str(path))


def parse_pieces(content: bytes, path: str) -> Pieces:
    """Return a SentencePiece model from its content."""
    with packages_of_extra("marian", "Marian's vocabulary"):
        from sentencepiece import SentencePieceProcessor
    try:
        model = SentencePieceProcessor(model_proto=content)
        symbols = [model.IdToPiece(i) for i in range(model.GetPieceSize())]
        if min(model.eos_id(), model.unk_id()) < 0 or len(set(symbols)) < len(symbols):
            raise ValueError("no end token, no unknown token, or two equal symbols")
    except Exception as error:  # sentencepiece does not name the file
        raise UserError(
            f"{path} is not a SentencePiece model with an end token and an unknown token.", field=path
        ) from error
    return Pieces(path, content, symbols, model.eos_id(), model.unk_id())


def check_pieces(pieces: Sequence[Pieces], settings: Settings) -> None:
    """Raise `UserError` if vocabularies do not belong together."""
    source, target = pieces
    if settings.fields()["share_encoder_decoder_embeddings"] and source.content != target.content:
        raise UserError(
            f"{target.path} differs from {source.path}, but the model has one vocabulary for both sides.",
            field=target.path,
        )
    names = [(side.symbols[side.end], side.symbols[side.unknown]) for side in pieces]
    if names[0] != names[1] or any(PADDING in side.symbols for side in pieces):
        raise UserError(
            f"The end and unknown tokens of {target.path} and {source.path} must have the same names, and {PADDING} "
            "must not be a symbol.",
            field=target.path,
        )


def write_tokenizers(pieces: Sequence[Pieces], config: NMTTransformerConfig, folder: Path) -> TokenizerPair:
    """Write tokenizers of MarianMT with these vocabularies, one for both sides if they are the same."""
    from transformers import MarianTokenizer

    source, target = pieces
    is_joint = source.content == target.content
    for name, vocabulary in (("source", source), ("target", target)):
        (folder / f"{name}.spm").write_bytes(vocabulary.content)
        further = [f"<row {i}>" for i in range(len(vocabulary.symbols), config.vocab_size - 1)]
        symbols = {symbol: i for i, symbol in enumerate([*vocabulary.symbols, *further, PADDING])}
        (folder / f"{name}_vocab.json").write_text(json.dumps(symbols, ensure_ascii=False), encoding="utf-8")
    tokenizer = MarianTokenizer(
        source_spm=str(folder / "source.spm"),
        target_spm=str(folder / "target.spm"),
        vocab=str(folder / "source_vocab.json"),
        target_vocab_file=None if is_joint else str(folder / "target_vocab.json"),
        separate_vocabs=not is_joint,
        unk_token=source.symbols[source.unknown],
        eos_token=source.symbols[source.end],
        pad_token=PADDING,
        model_max_length=config.max_position_embeddings,
    )
    tokenizers = save_tokenizers(tokenizer, folder, config.share_encoder_decoder_embeddings)
    for name in ("source", "target"):
        (folder / f"{name}_vocab.json").unlink(missing_ok=True)  # the saved one is vocab.json
    return tokenizers


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
