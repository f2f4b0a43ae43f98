"""Check that a model was trained with given tokenizers: padding, sizes, end token, and checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .._plain_text import encode_plain
from ..errors import UserError, short_repr
from .languages import in_languages, language_ids


# Field of a configuration with the stamps of the model's tokenizers.
STAMPS = "tokenizer_stamps"
# Texts that tokenizers of the same symbols encode differently: case, accents (composed and decomposed), digits, spaces,
# punctuation, other scripts, and text like a control token. A changed word changes the stamps of all models.
PROBES = (
    "The old house, which she HAD seen in 1987, wasn't sold; it cost 3.50 -- didn't it?",
    "Größe, façade, nai\u0308ve, Über; \u201eZitat\u201c \u2013 (so)!",
    "  two  spaces\tand a tab </s> <pad> \u2581_ ",
    "\u6211\u4eec\u53bb\u5317\u4eac\u3002\uff21\u3000\u041f\u0440\u0438\u0432\u0435\u0442 \u03a3\u03af \ufb01",
)
# Number of symbols of the vocabulary that are also encoded, because it may have no symbol of the texts above.
OWN_PROBES = 64


def stamp_tokenizers(
    config: PreTrainedConfig, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase | None = None
) -> None:
    """
    Write stamps of a model's tokenizers, `source` and `target` (by default the same), into its `config`, so that others
    are rejected. Tokens that are added later at the end of the vocabulary have no effect on them.
    """
    setattr(config, STAMPS, {"source": stamp(source), "target": stamp(target or source, is_target=True)})


def stamp(tokenizer: PreTrainedTokenizerBase, size: int | None = None, is_target: bool = False) -> dict[str, Any]:
    """
    Return number and checksum of a tokenizer's symbols, or of its first `size` ones, and a checksum of its encodings of
    test texts (`behaviour`; omitted if encoding is random or fails).
    """
    symbols = sorted((id, token) for token, id in tokenizer.get_vocab().items() if size is None or id < size)
    size = 1 + symbols[-1][0] if size is None and symbols else size
    result = {"symbols": size, "sha256": checksum("\n".join(f"{id} {token}" for id, token in symbols))}
    language = min(language_ids(tokenizer), default=None)  # every text is encoded in its own
    own = [token.replace("\u2581", " ") for _, token in symbols[:: max(1, len(symbols) // OWN_PROBES)]]
    probes = [*PROBES, *own, *(token.swapcase() for token in own)]
    try:  # three times, since subwords may be sampled
        with in_languages(tokenizer, language, language):
            encodings = [
                [[int(id) for id in encode_plain(tokenizer, text, is_target)["input_ids"]] for text in probes]
                for _ in range(3)
            ]
    except Exception:  # the `tokenizers` library raises no other kind for a vocabulary without an unknown token
        return result
    if encodings[0] == encodings[1] == encodings[2]:
        result["behaviour"] = checksum(json.dumps(encodings[0]))
    return result


def checksum(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def vocabulary_sizes(config: Any) -> tuple[int, int]:
    """Return the numbers of source and target token ids; each side may have a configuration of its own."""
    own = getattr(config, "vocab_size", None)
    source, target = (own if own is not None else getattr(config, side).vocab_size for side in ("encoder", "decoder"))
    return source, getattr(config, "decoder_vocab_size", None) or target


def number_of_symbols(tokenizer: PreTrainedTokenizerBase, is_target: bool = False) -> int:
    """Return the number of symbols. MarianMT may have one vocabulary per side; M2M-100 does not count its languages."""
    separate, languages = getattr(tokenizer, "target_encoder", None), getattr(tokenizer, "lang_code_to_id", None)
    if is_target and isinstance(separate, Mapping):
        return len(separate)
    ids = [id for id in languages.values() if id is not None] if isinstance(languages, Mapping) else []
    return max(len(tokenizer), *(id + 1 for id in ids)) if ids else len(tokenizer)


def check_stamp(tokenizer: PreTrainedTokenizerBase, expected: Mapping[str, Any], side: str) -> None:
    """Raise `UserError` if symbols or encodings do not match a stamp. Those of older releases have no encodings."""
    own, difference = stamp(tokenizer, expected.get("symbols"), side == "target"), ""
    if own["sha256"] != expected.get("sha256"):
        difference = "has other symbols than the one that the model was trained with"
    elif expected.get("behaviour") is not None and own.get("behaviour") != expected["behaviour"]:
        difference = (
            "has the same symbols as the one that the model was trained with, but encodes text differently "
            "(tokenizer.json or its settings were changed)"
        )
    if difference:
        raise UserError(
            f"The {side} tokenizer {difference}. Use the tokenizer that training saved. After training again, call "
            "stamp_tokenizers(model.config, ...) and save the model. check=False disables this check (Python).",
            field=f"{side} tokenizer",
        )


def check_end(model: Any, target: PreTrainedTokenizerBase) -> None:
    """
    Raise `UserError` if the model ends sentences with another token than the tokenizer, or with none, or if its
    generation settings have other control tokens than its configuration.
    """
    config, generation = model.config, getattr(model, "generation_config", None)
    for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        trained, used = (ids_of(settings, name) for settings in (config, generation))
        if trained and used and not trained & used:
            raise UserError(
                f"{name} is {short_repr(min(used))} in generation_config.json, but {min(trained)} in config.json. "
                "Write the one used in training into both, or disable this check with check=False (Python).",
                field=name,
            )
    ends = ids_of(config, "eos_token_id") | ids_of(generation, "eos_token_id")
    if not ends:
        raise UserError(
            "The model has no eos_token_id, so it could not end a sentence. Write the one used in training into "
            "config.json, or disable this check with check=False (Python).",
            field="eos_token_id",
        )
    if target.eos_token_id is not None and target.eos_token_id not in ends:
        raise UserError(
            f"The target tokenizer ends sentences with token {short_repr(target.eos_token_id)}, the model with "
            f"{min(ends)}. Use the tokenizer that the model was trained with, or disable this check with check=False "
            "(Python).",
            field="target tokenizer",
        )


def ids_of(settings: Any, name: str) -> set[int]:
    """Return the token ids of a setting: one, several or none. Raise `UserError` for anything else."""
    value = getattr(settings, name, None)
    values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if value == [] or any(isinstance(number, bool) or not isinstance(number, int) for number in values):
        raise UserError(
            f"{name}={short_repr(value)} must be a token id or a list of them. Correct it (config.json, "
            "generation_config.json, recnmt_engine.json), or export the model again.",
            field=name,
        )
    return set(values)
