"""Language codes, and languages that a tokenizer names by tokens, as those of M2M-100, NLLB and mBART do."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import langcodes

from .._plain_text import encode_plain
from ..errors import UserError, short_repr
from ..options import LANGUAGE


MOST_CODES = 12  # in an error message


@lru_cache(1024)
def main_language(code: str) -> str:
    """
    Return the language of a code or tag in the shortest form: `de` for `deu`, `ger`, `deu_Latn`, `de_DE`, `__de__`,
    `<2de>` and `>>deu<<`, and `zh` for `cmn_Hans`, `ar` for `arb_Arab`, `no` for `nb`, as their usual varieties.
    """
    main = re.split("[-_]", code.strip("<>_").removeprefix("2"))[0].lower()
    try:
        language = langcodes.get(main).prefer_macrolanguage().language or main
    except langcodes.LanguageTagError:
        return main
    return "no" if language == "nb" else language


@lru_cache(1024)
def key_of_language(code: str, keys: tuple[str, ...]) -> str:
    """Return the key that is another code of the same language, if there is exactly one; else the code itself."""
    alike = [key for key in keys if langcodes.tag_is_valid(key) and main_language(key) == main_language(code)]
    return alike[0] if code not in keys and len(alike) == 1 else code


def check_codes(options: Any) -> None:
    """Raise `UserError` unless the fields `source_lang` and `target_lang` are language codes or `None`."""
    for name in ("source_lang", "target_lang"):
        code = getattr(options, name)
        if code is not None and not LANGUAGE.fullmatch(code):
            raise UserError(f"{name}={short_repr(code)} is not a language code such as en, de or zh-CN.", field=name)


def list_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def same(one: str, other: str) -> bool:
    """Return whether two codes differ at most in case and separators."""
    return one.replace("-", "_").lower() == other.replace("-", "_").lower()


def find_code(code: str, known: Collection[str]) -> str | None:
    """Return the known code that a code names, which may differ in case and separators; `None` if there is none."""
    code = code.strip("_")
    return code if code in known else next((other for other in known if same(code, other)), None)


def known_code(code: str, known: Collection[str], field: str) -> str:
    """Return a code as a tokenizer writes it; `UserError` if it is not known."""
    found = find_code(code, known)
    require_language(found is not None, field, code, known)
    return found or code


def require_language(is_known: bool, field: str, code: str, known: Iterable[str]) -> None:
    """Raise `UserError` for a code that a model does not know, with the nearest known ones."""
    if is_known:
        return

    def nearness(other: str) -> tuple[bool, float]:
        return main_language(other) == main_language(code), difflib.SequenceMatcher(None, code, other).ratio()

    codes = list_names(sorted(sorted(known), key=nearness, reverse=True), MOST_CODES)
    raise UserError(f"{field}={short_repr(code)} is not a language of this model. Use {codes}.", field=field)


def language_ids(tokenizer: Any) -> dict[str, int]:
    """Return the languages that a tokenizer names by a token in every text, with the ids of these tokens."""
    if not hasattr(tokenizer, "src_lang") or not hasattr(tokenizer, "tgt_lang"):
        return {}
    ids = getattr(tokenizer, "lang_code_to_id", None)
    if not isinstance(ids, Mapping):
        named = {str(token) for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
        tokens = [token for token in tokenizer.all_special_tokens if token not in named]
        ids = dict(zip(tokens, tokenizer.convert_tokens_to_ids(tokens), strict=True))
    ids = {code.strip("_"): id for code, id in ids.items()}
    return ids if set(ids.values()) & set(encode_plain(tokenizer, "a")["input_ids"]) else {}


@contextmanager
def in_languages(tokenizer: Any, source: str | None, target: str | None) -> Iterator[None]:
    """Set the languages of the sources and targets that a tokenizer encodes; `None` leaves it as it is."""
    languages = {name: code for name, code in (("src_lang", source), ("tgt_lang", target)) if code is not None}
    before = {name: getattr(tokenizer, name) for name in languages}
    for name, code in languages.items():
        setattr(tokenizer, name, code)
    try:
        yield
    finally:
        for name, code in before.items():
            setattr(tokenizer, name, code)
