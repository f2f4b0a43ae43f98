"""
A generated English-German corpus, for tests and first steps.

A small grammar generates each sentence in both languages. Order and hierarchy matter in every sentence: German verbs
are second, first (after a fronted word) or last (in subordinate clauses), separable verbs split, articles, adjectives
and relative pronouns agree in gender, number and case, and relative and complement clauses nest to a chosen depth.
Commas are words of their own until [`write`] joins them.
"""

import random
import re
from importlib import resources
from typing import NamedTuple

import yaml

from ..errors import UserError


EMBEDDING = 0.45  # probability of a relative, complement or adverbial clause if the depth allows one
DRAWN = ("validation", "test", "test_deep", "train")  # the splits of a corpus, in the order in which they are drawn


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
        return self.de + (("n" if self.de[-1] in "er" else "en") if self.weak and case != "nom" else "")


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
        """Whether the object must be a person or an animal, as for help, call and invite."""
        return self.case == "dat" or self.particle == "ein" or self.de == "rufen"


LEXICON = yaml.safe_load(resources.files(__package__).joinpath("generated_lexicon.yaml").read_text(encoding="utf-8"))
NOUNS, PLACES = ([Noun(*row) for row in LEXICON[kind]] for kind in ("nouns", "places"))
TRANSITIVE, INTRANSITIVE, SENTENTIAL, MODALS = (
    [Verb(*row) for row in LEXICON[kind]] for kind in ("transitive", "intransitive", "sentential", "modals")
)
ENDINGS = {
    name: {case: dict(zip(("m", "f", "n", "pl"), endings, strict=True)) for case, endings in cases.items()}
    for name, cases in LEXICON["endings"].items()
}


class Pair(NamedTuple):
    """An English sentence, its German translation, and the depth of its clauses (0: no subordinate clause)."""

    en: str
    de: str
    depth: int


class NounPhrase(NamedTuple):
    """A noun phrase, in German by case; `depth` is that of its relative clauses."""

    en: str
    de: dict[str, str]
    number: str = "sg"
    person: int = 3
    depth: int = 0


class Predicate(NamedTuple):
    """A finite verb with its complements, except the subject."""

    en: str
    finite: str
    middle: str
    bracket: str  # particle or infinitive at the end
    cluster: str  # all verbs, at the end of a subordinate clause
    complement: str = ""
    depth: int = 0

    def german(self, order: str, subject: str = "") -> str:
        """Return the clause with the verb second, first (`"inverted"`) or last (`"final"`)."""
        if order == "final":
            return f"{subject} {self.middle} {self.cluster} {self.complement}"
        start = f"{subject} {self.finite}" if order == "second" else f"{self.finite} {subject}"
        return f"{start} {self.middle} {self.bracket} {self.complement}"


def predicate(
    subject: NounPhrase,
    verb: Verb,
    past: bool,
    object: NounPhrase | None = None,
    modal: Verb | None = None,
    negated: bool = False,
    place: tuple[str, str] = ("", ""),
    complement: Pair | None = None,
) -> Predicate:
    """Build a predicate with a verb; not both modal and negated."""
    third = subject.number == "sg" and subject.person == 3
    if modal:
        english = f"{modal.english(past, third)} {verb.en}"
    elif negated:
        english = f"{'did' if past else 'does' if third else 'do'} not {verb.en}"
    else:
        english = verb.english(past, third)
    near, far = (verb.en_particle, "") if verb.en_particle in ("at", "to") else ("", verb.en_particle)
    english = f"{english} {near} {object.en if object else ''} {far} {place[0]}"
    finite = (modal or verb).german(past, subject.number, subject.person)
    bracket = verb.particle + verb.de if modal else verb.particle
    middle = f"{object.de[verb.case] if object else ''} {'nicht' if negated else ''} {place[1]}"
    cluster = f"{bracket} {finite}" if modal else bracket + finite
    if complement is None:
        return Predicate(english, finite, middle, bracket, cluster, depth=object.depth if object else 0)
    english, german = f"{english} that {complement.en}", f", dass {complement.de}"
    return Predicate(english, finite, middle, bracket, cluster, german, 1 + complement.depth)


def write(words: str) -> str:
    """Write a sentence: one comma where several meet, none before the full stop, first letter upper-case."""
    text = re.sub("( ,)+", ",", " ".join(words.split())).removesuffix(",")
    return text[0].upper() + text[1:] + "."


class Grammar:
    """Draws sentences. `rng` is the source of all choices; the order of draws decides the corpus."""

    def __init__(self, rng: random.Random):
        self.choice, self.random = rng.choice, rng.random

    def chance(self, probability: float) -> bool:
        """Return `True` with a given probability."""
        return self.random() < probability

    def noun_phrase(self, depth: int, kinds: tuple[str, ...], subject: bool = False) -> NounPhrase:
        """Draw a noun phrase, a pronoun (as subject), or two noun phrases joined by "and"."""
        if subject and self.chance(0.15):
            english, german, number, person = self.choice(LEXICON["pronouns"])
            return NounPhrase(english, {"nom": german}, number, person)
        if not self.chance(0.08):
            return self.simple_phrase(depth, kinds)
        first, second = self.simple_phrase(0, kinds), self.simple_phrase(0, kinds)
        german_by_case = {case: f"{first.de[case]} und {second.de[case]}" for case in first.de}
        return NounPhrase(f"{first.en} and {second.en}", german_by_case, "pl")

    def simple_phrase(self, depth: int, kinds: tuple[str, ...]) -> NounPhrase:
        """Draw a noun with determiner, perhaps adjective and relative clause."""
        noun = self.choice([noun for noun in NOUNS if noun.kind in kinds])
        plural = self.chance(0.35)
        determiners = LEXICON["determiners"]
        if plural:
            determiners = [*(row for row in determiners if row[1] is not None), LEXICON["bare_plural"]]
        *articles, stem, endings, declension = self.choice(determiners)
        adjective = self.choice(LEXICON["adjectives"]) if self.chance(0.35) else None
        has_relative = depth > 0 and self.chance(EMBEDDING)
        relative = self.relative_clause(depth - 1, noun, plural) if has_relative else Pair("", "", 0)
        english = f"{adjective[0] if adjective else ''} {noun.en_plural if plural else noun.en}".strip()
        article = "an" if articles[plural] == "a" and english[0] in "aeiou" else articles[plural]
        form, german = "pl" if plural else noun.gender, {}
        for case, own in ENDINGS[endings].items():
            word = adjective[1] + ENDINGS[declension][case][form] if adjective else ""
            german[case] = f"{stem}{own[form]} {word} {noun.german(plural, case)} {relative.de}"
        return NounPhrase(f"{article} {english} {relative.en}", german, "pl" if plural else "sg", 3, relative.depth)

    def relative_clause(self, depth: int, head: Noun, plural: bool) -> Pair:
        """Draw a relative clause, with its depth, in which the head is the subject or the object."""
        if head.kind != "thing" and self.chance(0.5):
            case, subject = "nom", NounPhrase("", {"nom": ""}, "pl" if plural else "sg")
            part = self.verb_phrase(subject, depth, self.chance(0.5), complement=False)
        else:
            subject = self.noun_phrase(depth, ("person",), subject=True)
            verb, past, negated = self.choice(TRANSITIVE), self.chance(0.5), self.chance(0.1)
            # "that the boy looks at": the object's place is empty, so a particle cannot follow the object.
            while verb.en_particle or (head.kind == "thing" and verb.needs_living_object):
                verb = self.choice(TRANSITIVE)
            modal = self.choice(MODALS) if not negated and self.chance(0.15) else None
            case, part = verb.case, predicate(subject, verb, past, modal=modal, negated=negated)
        english = "who" if case == "nom" and head.kind == "person" else "that"
        form = "pl" if plural else head.gender
        pronoun = "denen" if (case, form) == ("dat", "pl") else "d" + ENDINGS["definite"][case][form]
        german = f", {pronoun} {part.german('final', subject.de['nom'])} ,"
        return Pair(f"{english} {subject.en} {part.en}", german, 1 + max(part.depth, subject.depth))

    def verb_phrase(self, subject: NounPhrase, depth: int, past: bool, complement: bool = True) -> Predicate:
        """Draw a predicate: with an adjective, a complement clause (if allowed), or with or without object."""
        draw = self.random()
        if draw < 0.1:
            adjective, negated = self.choice(LEXICON["adjectives"]), self.chance(0.2)
            form = subject.number if past or subject.number == "pl" else f"sg {subject.person}"
            english, german = LEXICON["copula"][f"past {form}" if past else form]
            english = f"{english} {'not' if negated else ''} {adjective[0]}"
            return Predicate(english, german, f"{'nicht' if negated else ''} {adjective[1]}", "", german)
        if complement and depth > 0 and draw < 0.1 + 0.5 * EMBEDDING:
            verb = self.choice(SENTENTIAL)
            return predicate(subject, verb, past, complement=self.clause(depth - 1, "final", adjuncts=False))
        verb, thing = self.choice(INTRANSITIVE if draw < 0.45 else TRANSITIVE), None
        if draw >= 0.45:
            thing = self.noun_phrase(depth, ("person", "animal", *(() if verb.needs_living_object else ("thing",))))
        modal = self.choice(MODALS) if self.chance(0.2) else None
        negated = modal is None and self.chance(0.15)
        # After a relative clause, a place would be ambiguous in English: it could belong to either clause.
        is_closed = thing is None or thing.depth == 0
        place = self.place() if is_closed and self.chance(0.2) else ("", "")
        return predicate(subject, verb, past, thing, modal, negated, place)

    def place(self) -> tuple[str, str]:
        """Draw a prepositional phrase."""
        if self.chance(0.6):
            noun = self.choice(PLACES)
            return f"in the {noun.en}", f"{'in der' if noun.gender == 'f' else 'im'} {noun.german(False, 'dat')}"
        english, german, case = self.choice(LEXICON["prepositions"])
        phrase = self.simple_phrase(0, ("person", "animal"))
        return f"{english} {phrase.en}", f"{german} {phrase.de[case]}"

    def clause(self, depth: int, order: str = "second", adjuncts: bool = True) -> Pair:
        """Draw a clause; `adjuncts` allows an adverb, or a subordinate clause in front or at the end."""
        subject = self.noun_phrase(depth, ("person", "animal"), subject=True)
        past = self.chance(0.5)
        predicates = [self.verb_phrase(subject, depth, past)]
        if predicates[0].depth == 0 and self.chance(0.12):  # otherwise the second verb could belong to either clause
            predicates.append(self.verb_phrase(subject, 0, past, complement=False))
        adverb, below, is_fronted = None, None, False
        if adjuncts and depth > 0 and not predicates[-1].complement and self.chance(0.4 * EMBEDDING):
            conjunction = self.choice(LEXICON["conjunctions"])
            below = self.clause(depth - 1, "final", adjuncts=False)
            is_fronted = self.chance(0.5)
        elif adjuncts and self.chance(0.2):
            adverb = self.choice(LEXICON["adverbs"])
        english = f"{subject.en} {' and '.join(part.en for part in predicates)}"
        german = predicates[0].german("inverted" if adverb or is_fronted else order, subject.de["nom"])
        for part in predicates[1:]:  # shared subject: the verb is first in its part, or last
            german += f" und {part.german('final' if order == 'final' else 'second')}"
        depth = max(subject.depth, *(part.depth for part in predicates))
        if adverb:
            english, german = f"{adverb[0]} , {english}", f"{adverb[1]} {german}"
        if below is None:
            return Pair(english, german, depth)
        low_english, low_german = f"{conjunction[0]} {below.en}", f"{conjunction[1]} {below.de}"
        english = f"{low_english} , {english}" if is_fronted else f"{english} {low_english}"
        german = f"{low_german} , {german}" if is_fronted else f"{german} , {low_german}"
        return Pair(english, german, max(depth, 1 + below.depth))

    def sentence(self, max_depth: int) -> Pair:
        """Draw a sentence of one main clause or two."""
        first = self.clause(max_depth)
        if not self.chance(0.1):
            return Pair(write(first.en), write(first.de), first.depth)
        second = self.clause(0, adjuncts=False)
        english, german = self.choice([("but", "aber"), ("and", "und")])
        words = f"{first.en} , {english} {second.en}", f"{first.de} , {german} {second.de}"
        return Pair(write(words[0]), write(words[1]), max(first.depth, second.depth))


def generate_corpus(
    train: int = 20000,
    validation: int = 500,
    test: int = 500,
    test_deep: int = 500,
    max_depth: int = 2,
    deep_depth: int = 4,
    seed: int = 1,
) -> dict[str, list[Pair]]:
    """
    Generate the corpus as lists of pairs; the same arguments give the same corpus on every machine.

    Args:
        train, validation, test, test_deep (`int`): Sentence pairs of each split.
        max_depth (`int`, *optional*, defaults to 2): Deepest nesting of clauses in train, validation and test.
        deep_depth (`int`, *optional*, defaults to 4): Deepest nesting in `test_deep`, whose sentences are all deeper
            than `max_depth`.
        seed (`int`, *optional*, defaults to 1): Source of all choices.

    Returns:
        Splits `"train"`, `"validation"`, `"test"`, `"test_deep"`. No sentence, on either side, occurs twice.

    Raises:
        ValueError: The grammar has too few sentences of a requested depth.
    """
    sizes = {"train": train, "validation": validation, "test": test, "test_deep": test_deep}
    grammar, seen, splits = Grammar(random.Random(seed)), set[str](), dict[str, list[Pair]]()
    for name in DRAWN:
        depth, above = (deep_depth, max_depth) if name == "test_deep" else (max_depth, -1)
        splits[name], tries = [], 0
        while len(splits[name]) < sizes[name]:
            tries += 1
            if tries > 200 * sizes[name] + 10000:
                count = f"{len(splits[name])} of {sizes[name]}"
                raise UserError(f"The grammar has too few sentences of depth {depth}: {count}.")
            pair = grammar.sentence(depth)
            if pair.depth > above and not seen & {pair.en, pair.de}:
                seen.update((pair.en, pair.de))
                splits[name].append(pair)
    return {name: splits[name] for name in sizes}


def generate_split(name: str, size: int, seed: int = 1) -> list[Pair]:
    """Return a split of [`generate_corpus`] with `size` pairs; those drawn after it do not change it."""
    later = dict.fromkeys(DRAWN[DRAWN.index(name) + 1 :], 0)
    return generate_corpus(seed=seed, **later, **{name: size})[name]
