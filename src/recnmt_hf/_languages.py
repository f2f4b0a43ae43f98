"""Language codes in one form, for the packages that have rules or models of languages."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import langcodes

from .errors import UserError, short_repr
from .options import LANGUAGE


@lru_cache(1024)
def main_language(code: str) -> str:
    """
    Return the language that a code or tag names in the shortest form, without script and region: `de` for `deu`, `ger`,
    `deu_Latn`, `de_DE`, `de-AT`, `__de__`, `<2de>` and `>>deu<<`. The usual variety of a language has the code of the
    language: `zh` for `cmn_Hans`, `ar` for `arb_Arab`, `no` for `nb`. A code that is not in ISO 639 is lowercased.
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
            raise UserError(
                f"{name}={short_repr(code)} is not a language code. Use letters, digits, _ and -, such as en, de or "
                "zh-CN.",
                field=name,
            )
