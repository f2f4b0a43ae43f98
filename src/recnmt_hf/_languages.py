"""Language codes in one form, for the packages that have rules or models of languages."""

from __future__ import annotations

import re
from functools import lru_cache

import langcodes


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
