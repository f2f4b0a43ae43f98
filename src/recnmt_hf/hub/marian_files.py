"""Conversion of Marian's own files, `.npz` and `.bin`, to base Transformers and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import GenerationConfig

from .._bounded_reading import read_bounded
from ..data.files import open_output, open_output_folder
from ..data.languages import list_names
from ..data.text import open_bytes
from ..data.tokenizer_pair import stamp_tokenizers
from ..errors import UserError
from ..inference.loading import quiet_loading
from ..inference.model_checks import check_weights
from ..inference.model_settings import start_id
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.modeling_nmt_transformer import NMTTransformerForConditionalGeneration
from ..training.evidence import Evidence, about_model
from ..training.processes import logger
from .checked_copy import load_checked
from .marian_arrays import FURTHER, OLD_OUTPUT, OUTPUT, OUTPUT_BIAS, Place, places_of
from .marian_binary import npz_content, parse_settings, read_marian_file
from .marian_settings import (
    IGNORED_BY_SEARCH,
    IMPORTED_SETTINGS,
    Settings,
    check_function,
    settings_of,
)
from .marian_vocabularies import Pieces, check_pieces, pieces_of, read_pieces, write_tokenizers


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

    Raises:
        UserError: A file is missing, damaged, or of another program; a setting or an array is not supported; or the
            files do not belong together. Nothing is written.
        FileExistsError: The output exists and is not empty.
    """
    quiet_loading()
    file, path = read_marian_file(source), str(source)
    settings = Settings(file.settings, path)
    search = settings
    if search_settings is not None:
        with open_bytes(search_settings) as opened:
            own = parse_settings(read_bounded(opened, str(search_settings)), str(search_settings))
        search = Settings({**file.settings, **own}, str(search_settings), IGNORED_BY_SEARCH)
    pieces = [read_pieces(vocabulary) for vocabulary in vocabularies]
    check_pieces(pieces, settings)
    model = build_model(file.arrays, settings, pieces)
    model.generation_config = generation_settings(search, model.config, pieces[1])
    with open_output_folder(output, must_be_new=True) as working:
        tokenizers = write_tokenizers(pieces, model.config, working)
        stamp_tokenizers(model.config, *tokenizers)
        tokenizers.check(model)
        model.save_pretrained(working)
        Evidence(model=about_model(model.config, model.num_parameters())).save(working)
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
    needed = {name for place in places_of(config, not omits_bias) for name in place.arrays}
    if needed != arrays.keys():
        sides = (sorted({name[:60] for name in names}) for names in (arrays.keys() - needed, needed - arrays.keys()))
        unknown, missing = (list_names(names) or "none" for names in sides)
        raise UserError(
            f"{settings.path} does not have the arrays of its settings: unknown arrays {unknown}; missing {missing}.",
            field=settings.path,
        )
    if omits_bias:
        arrays[OUTPUT_BIAS] = np.zeros((1, sizes[1]), np.float32)
    places = list(places_of(config))
    with torch.device("meta"):  # wrong settings could ask for more memory than there is
        expected = NMTTransformerForConditionalGeneration(config).state_dict()
    for place in places:
        views = place.views(expected[place.parameter], symbols_of(place, sizes))
        for name, view in zip(place.arrays, views, strict=True):
            if arrays[name].shape != view.shape:
                raise UserError(
                    f"{settings.path}: the array {name} has the shape {arrays[name].shape}; by the settings and "
                    f"vocabularies it must be {tuple(view.shape)}.",
                    field=settings.path,
                )
    model = NMTTransformerForConditionalGeneration(config)
    state = model.state_dict()
    for place in places:
        parameter = state[place.parameter]
        if place.kind in FURTHER:
            parameter.fill_(FURTHER[place.kind])
        for name, view in zip(place.arrays, place.views(parameter, symbols_of(place, sizes)), strict=True):
            view.copy_(torch.from_numpy(arrays[name]))
    filled = {*model.get_expanded_tied_weights_keys(), *(place.parameter for place in places)}
    assert filled == state.keys(), f"parameters differ: {filled ^ state.keys()}"
    check_weights(model)
    return model.eval()


def symbols_of(place: Place, sizes: Sequence[int]) -> int:
    """Return the size of the vocabulary to which a place belongs; all but one belong to the target's."""
    return sizes[place.arrays[0] != "encoder_Wemb"]


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
        UserError: Marian does not support the model or its tokenizers, the files are damaged, or the output has
            another ending.
    """
    output = Path(output)
    if output.suffix != ".npz":
        raise UserError(f"{output} does not end in .npz.", field=output)
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
        views = place.views(state[place.parameter], symbols_of(place, sizes))
        # Marian reads arrays in the order of C only.
        arrays |= zip(place.arrays, (np.ascontiguousarray(view.float().cpu().numpy()) for view in views), strict=True)
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
