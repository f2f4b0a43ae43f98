"""Words of the generated corpus, English and German, with the forms and endings in which they agree."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import yaml


class Noun(NamedTuple):
    """`gender` is m, f or n; `kind` is person, animal, thing or place; `weak` nouns take -n outside the nominative."""

    en: str
    en_plural: str
    de: str
    de_plural: str
    gender: str
    kind: str
    weak: bool

    def german(self, plural: bool, case: str) -> str:
        """Return the German form of a number and case."""
        if plural:
            return self.de_plural + ("n" if case == "dat" and self.de_plural[-1] not in "ns" else "")
        if self.weak and case != "nom":
            return self.de + ("n" if self.de[-1] in "er" else "en")
        return self.de


class Verb(NamedTuple):
    """German forms without the particle. `case` is that of the object; empty for intransitive verbs."""

    en: str
    en_third: str
    en_past: str
    de: str
    de_third: str
    de_past: str
    case: str
    particle: str
    en_particle: str

    def english(self, past: bool, third: bool) -> str:
        """Return the English finite form."""
        return self.en_past if past else self.en_third if third else self.en

    def german(self, past: bool, number: str, person: int) -> str:
        """Return the German finite form without the particle."""
        if past:
            return self.de_past + ("" if number == "sg" else "n" if self.de_past[-1] == "e" else "en")
        if number == "pl":
            return self.de
        # Modal verbs and "wissen" have one form for both persons, which does not end in -t.
        return self.de[:-1] if person == 1 and self.de_third[-1] == "t" else self.de_third

    @property
    def needs_living_object(self) -> bool:
        """`True` if the object must be a person or an animal, as for help, call and invite."""
        return self.case == "dat" or self.particle == "ein" or self.de == "rufen"


class Determiner(NamedTuple):
    """`plural` is `None` for words without a plural; `declension` is that of a following German adjective."""

    singular: str
    plural: str | None
    stem: str
    endings: dict[str, dict[str, str]]
    declension: str

    def adjective_ending(self, case: str, form: str) -> str:
        """Return the ending after a der-word (weak), an ein-word (mixed) or nothing (strong)."""
        if self.declension == "strong":
            return "en" if case == "dat" else "e"
        if form == "pl" or case == "dat" or (case == "acc" and form == "m"):
            return "en"
        return {"m": "er", "f": "e", "n": "es"}[form] if self.declension == "mixed" else "e"


LEXICON = yaml.safe_load(resources.files(__package__).joinpath("generated_lexicon.yaml").read_text(encoding="utf-8"))
NOUNS, PLACES = ([Noun(*row) for row in LEXICON[kind]] for kind in ("nouns", "places"))
TRANSITIVE, INTRANSITIVE, SENTENTIAL, MODALS = (
    [Verb(*row) for row in LEXICON[kind]] for kind in ("transitive", "intransitive", "sentential", "modals")
)
# Pairs of English and German.
ADJECTIVES, ADVERBS, CONJUNCTIONS = (LEXICON[kind] for kind in ("adjectives", "adverbs", "conjunctions"))
COPULA, PREPOSITIONS, PRONOUNS = (LEXICON[kind] for kind in ("copula", "prepositions", "pronouns"))
ENDINGS = {
    name: {case: dict(zip(("m", "f", "n", "pl"), endings, strict=True)) for case, endings in cases.items()}
    for name, cases in LEXICON["endings"].items()
}
*DETERMINERS, BARE_PLURAL = (
    Determiner(singular, plural, stem, ENDINGS[endings], declension)
    for singular, plural, stem, endings, declension in (*LEXICON["determiners"], LEXICON["bare_plural"])
)
