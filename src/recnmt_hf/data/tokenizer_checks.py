"""Check that tokenizers are those that a model was trained with: padding, sizes, end token, and checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .._plain_text import encode_plain
from ..models.user_errors import UserError


# Field of a configuration with the stamps of the model's tokenizers.
STAMPS = "tokenizer_stamps"
# Embeddings have more rows than the tokenizer symbols where they were rounded up for speed, or by a few made-up words.
MULTIPLES = (8, 16, 32, 64, 128, 256)
MADE_UP = 8
# Texts in which tokenizers of the same symbols differ: case, accents (composed and not), digits, spaces, punctuation,
# other scripts, and what looks like a control token. A changed word changes every stamp that models carry.
PROBES = (
    "The old house, which she HAD seen in 1987, wasn't sold; it cost 3.50 -- didn't it?",
    "Größe, façade, nai\u0308ve, Über; \u201eZitat\u201c \u2013 (so)!",
    "  two  spaces\tand a tab </s> <pad> \u2581_ ",
    "\u6211\u4eec\u53bb\u5317\u4eac\u3002\uff21\u3000\u041f\u0440\u0438\u0432\u0435\u0442 \u03a3\u03af \ufb01",
)
# And that many of its own symbols, spread over the vocabulary: it may know none of the words above.
OWN_PROBES = 64


class ConfiguredModel(Protocol):
    """A model, or the description of an exported one."""

    @property
    def config(self) -> Any: ...

    @property
    def generation_config(self) -> Any: ...


def stamp_tokenizers(
    config: PreTrainedConfig, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase | None = None
) -> None:
    """
    Write stamps of a model's tokenizers into its configuration, so that others are refused. Tokens that are added later
    at the end of the vocabulary do not matter.
    """
    stamps = {"source": stamp(source), "target": stamp(target or source, is_target=True)}
    setattr(config, STAMPS, stamps)


def stamp(tokenizer: PreTrainedTokenizerBase, size: int | None = None, is_target: bool = False) -> dict[str, Any]:
    """
    Return number and checksum of a tokenizer's symbols, or of its first `size` ones, and a checksum of its encodings of
    test texts (`behaviour`; omitted if encoding is random or fails).
    """
    symbols = sorted((id, token) for token, id in tokenizer.get_vocab().items() if size is None or id < size)
    size = 1 + symbols[-1][0] if size is None and symbols else size
    found = {"symbols": size, "sha256": checksum("\n".join(f"{id} {token}" for id, token in symbols))}
    own = [token.replace("\u2581", " ") for _, token in symbols[:: max(1, len(symbols) // OWN_PROBES)]]
    probes = [*PROBES, *own, *(token.swapcase() for token in own)]
    # Three times, since subwords may be sampled.
    encodings = [encode_texts(tokenizer, probes, is_target) for _ in range(3)]
    if encodings[0] is not None and all(encoding == encodings[0] for encoding in encodings):
        found["behaviour"] = checksum(json.dumps(encodings[0]))
    return found


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str], is_target: bool) -> list[list[int]] | None:
    """Return token ids of texts; `None` if the tokenizer cannot encode them."""
    try:
        return [[int(id) for id in encode_plain(tokenizer, text, is_target)["input_ids"]] for text in texts]
    except Exception:  # the `tokenizers` library raises no other kind for a vocabulary without an unknown token
        return None


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_tokenizers(
    model: ConfiguredModel, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, strict: bool = True
) -> None:
    """
    Check that tokenizers are the model's.

    They must have a padding token, no more symbols than the embeddings have rows, and on both sides the model's padding
    id. If the model has stamps of its tokenizers ([`stamp_tokenizers`], as training writes them), they must match.
    Otherwise the end-of-sentence ids must agree, and the embeddings may have more rows than there are symbols only if
    they are rounded up to a multiple of 8 to 256, or have a few more.

    Args:
        model (`PreTrainedModel`): A model, or anything with its `config` and `generation_config`.
        source, target (`PreTrainedTokenizerBase`): Tokenizers of source and target.
        strict (`bool`, *optional*, defaults to `True`): `False` checks only what makes translating impossible.

    Raises:
        UserError: They are not the model's.
    """
    config = model.config
    rows = {"source": config.vocab_size, "target": getattr(config, "decoder_vocab_size", None) or config.vocab_size}
    stamps = getattr(config, STAMPS, None)
    for side, tokenizer in (("source", source), ("target", target)):
        if tokenizer.pad_token_id is None:
            raise missing_padding_error(tokenizer, side)
        check_vocabulary(tokenizer, rows[side], side)
        if not strict:
            continue
        if isinstance(stamps, Mapping) and isinstance(stamps.get(side), Mapping):
            check_stamp(tokenizer, stamps[side], side)
        else:
            check_size(tokenizer, rows[side], side)
    if strict:
        check_padding(source, target, getattr(config, "pad_token_id", None))
        check_end(model, target)


def missing_padding_error(tokenizer: PreTrainedTokenizerBase, side: str) -> UserError:
    """Return the error for a tokenizer without a padding token; most often the file that names it was lost."""
    folder = Path(str(tokenizer.name_or_path))
    own = folder / "target_tokenizer"
    folder = own if side == "target" and own.is_dir() else folder
    file = folder / "tokenizer_config.json"
    if str(tokenizer.name_or_path) and folder.is_dir() and not file.exists():
        return UserError(
            f"The {side} tokenizer has no padding token: {file} is missing. Remedy: copy it from where the model was "
            "saved."
        )
    return UserError(
        f"The {side} tokenizer has no padding token. Remedy: set it (tokenizer.pad_token = ...) to the one that the "
        "model was trained with."
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, side: str) -> None:
    """Raise `UserError` if the tokenizer has more symbols than the model's embedding has rows."""
    if len(tokenizer) > rows:
        raise UserError(
            f"The {side} tokenizer has {len(tokenizer)} symbols, the model's {side} embedding only {rows} rows. "
            "Remedy: use the tokenizer the model was trained with, or resize the embeddings."
        )


def check_stamp(tokenizer: PreTrainedTokenizerBase, expected: Mapping[str, Any], side: str) -> None:
    """
    Raise `UserError` if a tokenizer's symbols or its encodings do not match its stamp (stamps of older releases have no
    encodings).
    """
    found = stamp(tokenizer, expected.get("symbols"), side == "target")
    if found["sha256"] != expected.get("sha256"):
        reason = "its symbols are others"
    elif expected.get("behaviour") is not None and found.get("behaviour") != expected["behaviour"]:
        reason = "it has the same symbols and encodes text in another way (tokenizer.json or its settings were changed)"
    else:
        return
    raise UserError(
        f"The {side} tokenizer is not the one that the model was trained with: {reason}. Remedy: use the tokenizer "
        "from the folder that training wrote. If the model was trained anew with this one, say so by "
        "stamp_tokenizers(model.config, ...) and save it; check=False (in Python) translates all the same."
    )


def check_size(tokenizer: PreTrainedTokenizerBase, rows: int, side: str) -> None:
    """Raise `UserError` if an embedding has more unused rows than rounding up explains."""
    size = len(tokenizer)
    padded = {-(-size // multiple) * multiple for multiple in MULTIPLES}
    if rows - size > MADE_UP and rows not in padded:
        raise UserError(
            f"The {side} tokenizer has {size} symbols, the model's {side} embedding {rows} rows: it is not the one "
            "that the model was trained with. Remedy: use that one; check=False (in Python) translates all the same."
        )


def check_padding(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, pad_token_id: int | None = None
) -> None:
    """
    Raise `UserError` if source tokenizer, target tokenizer and model (if its id is given) have different padding ids. A
    model has one, whose row is zero in both embeddings and is never trained.
    """
    ids = {"source tokenizer": source.pad_token_id, "target tokenizer": target.pad_token_id, "model": pad_token_id}
    if len({id for id in ids.values() if id is not None}) > 1:
        listed = ", ".join(f"{name} {id}" for name, id in ids.items() if id is not None)
        raise UserError(
            f"The padding ids differ ({listed}), but the model has one for both sides and learns nothing for it. "
            "Remedy: use tokenizers that have their padding token at the same place; `recnmt tokenizer` puts it at 0."
        )


def check_end(model: ConfiguredModel, target: PreTrainedTokenizerBase) -> None:
    """
    Raise `UserError` if the model ends sentences with another token than the tokenizer, or with none, or if its
    generation settings have other control tokens than its configuration.
    """
    config, generation = model.config, getattr(model, "generation_config", None)
    for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        trained, used = (ids_of(settings, name) for settings in (config, generation))
        if trained and used and not trained & used:
            raise UserError(
                f"generation_config.json says {name} {min(used)}, config.json {min(trained)}: the model was trained "
                "with one of them. Remedy: write that into both files; check=False (in Python) translates all the same."
            )
    ends = ids_of(config, "eos_token_id") | ids_of(generation, "eos_token_id")
    if not ends:
        raise UserError(
            "The model has no token that ends a sentence (eos_token_id), and could not end any. Remedy: write the one "
            "that it was trained with into config.json; check=False (in Python) translates all the same."
        )
    if target.eos_token_id is not None and target.eos_token_id not in ends:
        raise UserError(
            f"The model ends sentences with token {min(ends)}, the target tokenizer with {target.eos_token_id}: it is "
            "not the one that the model was trained with. Remedy: use that one; check=False (in Python) translates all "
            "the same."
        )


def ids_of(settings: Any, name: str) -> set[int]:
    """Return the token ids that a setting names: one, several or none. Raises `UserError` for anything else."""
    value = getattr(settings, name, None)
    values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if value == [] or any(isinstance(number, bool) or not isinstance(number, int) for number in values):
        raise UserError(
            f"{name}={value!r} in the model's settings (config.json, generation_config.json, recnmt_engine.json) is "
            "not allowed; it must be a token id or a list of them. Remedy: correct it, or export the model again."
        )
    return set(values)
