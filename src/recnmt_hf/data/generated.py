"""
A generated English-German corpus: the embedded default wherever a corpus is needed and none is named.

A small grammar draws a sentence as a tree and writes it in both languages. Order and hierarchy matter in every
sentence: German verbs stand second, first (after a fronted word) or last (in subordinate clauses), separable verbs
split, articles, adjectives and relative pronouns agree in gender, number and case, and relative and complement
clauses nest to a chosen depth.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .._values import Range, check_value
from ..models.user_errors import UserError
from .generated_lexicon import (
    ADJECTIVES,
    ADVERBS,
    BARE_PLURAL,
    CONJUNCTIONS,
    DEFINITE,
    DETERMINERS,
    INTRANSITIVE,
    MODALS,
    NOUNS,
    PLACES,
    PREPOSITIONS,
    PRONOUNS,
    SENTENTIAL,
    TRANSITIVE,
    Noun,
    Verb,
)


def needs_living_object(verb: Verb) -> bool:
    """Whether one helps, calls, invites ... only persons and animals."""
    return verb.case == "dat" or verb.particle == "ein" or (verb.de == "rufen")


def adjective_ending(declension: str, case: str, form: str) -> str:
    """The ending after a der-word (weak), an ein-word (mixed) or nothing (strong); `form` is m, f, n or pl."""
    if declension == "strong":
        return "en" if case == "dat" else "e"
    if form == "pl" or case == "dat" or (case == "acc" and form == "m"):
        return "en"
    if declension == "mixed":
        return {"m": "er", "f": "e", "n": "es"}[form]
    return "e"


T = TypeVar("T")


def present(part: T | None) -> T:
    """A part that a phrase of this kind always has."""
    assert part is not None
    return part


@dataclass
class NounPhrase:
    """A noun with determiner, adjective and relative clause, a pronoun, or two phrases joined by "and"."""

    noun: Noun | None = None
    plural: bool = False
    determiner: tuple[Any, ...] = BARE_PLURAL
    adjective: tuple[str, str] | None = None
    relative: RelativeClause | None = None
    pronoun: tuple[Any, ...] | None = None
    joined: tuple[NounPhrase, NounPhrase] | None = None

    @property
    def number(self) -> str:
        if self.pronoun:
            return self.pronoun[2]
        return "pl" if self.plural or self.joined else "sg"

    @property
    def person(self) -> int:
        return self.pronoun[3] if self.pronoun else 3

    @property
    def depth(self) -> int:
        parts = self.joined or ()
        return max([part.depth for part in parts] + [1 + self.relative.depth if self.relative else 0])

    def english(self) -> list[str]:
        if self.pronoun:
            return [self.pronoun[0]]
        if self.joined:
            return [*self.joined[0].english(), "and", *self.joined[1].english()]
        article = self.determiner[1 if self.plural else 0]
        head = present(self.noun)
        noun = head.en_plural if self.plural else head.en
        words = [self.adjective[0], noun] if self.adjective else [noun]
        if article == "a" and words[0][0] in "aeiou":
            article = "an"
        words = [article, *words] if article else words
        return words + (self.relative.english(self) if self.relative else [])

    def german(self, case: str) -> list[str]:
        if self.pronoun:
            return [self.pronoun[1]]
        if self.joined:
            return [*self.joined[0].german(case), "und", *self.joined[1].german(case)]
        noun = present(self.noun)
        form = "pl" if self.plural else noun.gender
        words = []
        _, _, stem, endings, declension = self.determiner
        if stem:
            # unser + e = unsere, but unser + en stays whole too; d + er = der
            words.append(stem + endings[case][form])
        if self.adjective:
            words.append(self.adjective[1] + adjective_ending(declension, case, form))
        words.append(german_noun(noun, self.plural, case))
        return words + (self.relative.german(form) if self.relative else [])


def german_noun(noun: Noun, plural: bool, case: str) -> str:
    if plural:
        return noun.de_plural + ("n" if case == "dat" and noun.de_plural[-1] not in "ns" else "")
    if noun.weak and case != "nom":
        return noun.de + ("n" if noun.de[-1] in "er" else "en")
    return noun.de


@dataclass
class VerbPhrase:
    """One verb with its object, negation, place and complement clause, or a copula with an adjective."""

    verb: Verb | None
    past: bool
    object: NounPhrase | None = None
    modal: Verb | None = None
    negated: bool = False
    predicate: tuple[str, str] | None = None
    place: tuple[list[str], list[str]] | None = None
    complement: Clause | None = None

    @property
    def depth(self) -> int:
        return max(self.object.depth if self.object else 0, 1 + self.complement.depth if self.complement else 0)

    @property
    def is_closed(self) -> bool:
        """Whether no clause stands at its end, to which following words could belong as well."""
        return self.complement is None and (self.object is None or self.object.depth == 0)

    def english(self, number: str, person: int) -> list[str]:
        third = number == "sg" and person == 3
        if self.predicate:
            if self.past:
                words = ["was" if number == "sg" else "were"]
            else:
                words = ["is"] if third else ["am"] if number == "sg" else ["are"]
            words += (["not"] if self.negated else []) + [self.predicate[0]]
        elif self.modal:
            finite = self.modal.en_past if self.past else self.modal.en_third if third else self.modal.en
            words = [finite, present(self.verb).en]
        elif self.negated:
            words = ["did" if self.past else "does" if third else "do", "not", present(self.verb).en]
        else:
            verb = present(self.verb)
            words = [verb.en_past if self.past else verb.en_third if third else verb.en]
        if self.verb and self.verb.en_particle in ("at", "to"):
            words.append(self.verb.en_particle)
        words += self.object.english() if self.object else []
        if self.verb and self.verb.en_particle not in ("", "at", "to"):
            words.append(self.verb.en_particle)
        words += self.place[0] if self.place else []
        return words + (["that", *self.complement.english()] if self.complement else [])

    def german_parts(self, number: str, person: int) -> tuple[str, list[str], str, list[str]]:
        """Finite verb, middle field, right bracket (particle, infinitive or ""), and what follows it."""
        middle: list[str] = []
        if self.predicate:
            if self.past:
                finite = "war" if number == "sg" else "waren"
            elif number == "pl":
                finite = "sind"
            else:
                finite = "bin" if person == 1 else "ist"
            middle = (["nicht"] if self.negated else []) + (self.place[1] if self.place else []) + [self.predicate[1]]
            return finite, middle, "", []
        verb = present(self.verb)
        head = self.modal or verb
        if self.past:
            finite = head.de_past if number == "sg" else head.de_past_plural
        elif number == "pl":
            finite = head.de
        else:
            finite = head.de_first if person == 1 else head.de_third
        bracket = verb.particle + verb.de if self.modal else verb.particle
        middle += self.object.german(present(verb.case)) if self.object else []
        middle += ["nicht"] if self.negated else []
        middle += self.place[1] if self.place else []
        after = [",", "dass", *self.complement.german("final")] if self.complement else []
        return finite, middle, bracket, after

    def german(self, order: str, subject: list[str], number: str, person: int) -> list[str]:
        """With the verb second, first ("inverted") or last ("final") in the clause."""
        finite, middle, bracket, after = self.german_parts(number, person)
        if order == "final":
            if self.modal:
                return [*subject, *middle, bracket, finite, *after]
            return [*subject, *middle, bracket + finite, *after]
        tail = [*middle, *([bracket] if bracket else []), *after]
        return [*subject, finite, *tail] if order == "second" else [finite, *subject, *tail]


@dataclass
class Clause:
    """A subject with one verb phrase or two, a fronted adverb, and a subordinate clause before or after."""

    subject: NounPhrase
    phrases: list[VerbPhrase]
    adverb: tuple[str, str] | None = None
    conjunction: tuple[str, str] | None = None
    subordinate: Clause | None = None
    fronted: bool = False

    @property
    def depth(self) -> int:
        below = 1 + self.subordinate.depth if self.subordinate else 0
        return max(self.subject.depth, below, *(phrase.depth for phrase in self.phrases))

    def english(self) -> list[str]:
        subject = self.subject
        words = ([*self.adverb[0].split(), ","] if self.adverb else []) + subject.english()
        for i, phrase in enumerate(self.phrases):
            words += (["and"] if i else []) + phrase.english(subject.number, subject.person)
        if self.subordinate:
            below = [present(self.conjunction)[0], *self.subordinate.english()]
            words = [*below, ",", *words] if self.fronted else [*words, *below]
        return words

    def german(self, order: str = "second") -> list[str]:
        subject, words = self.subject, []
        if order == "second" and (self.adverb or (self.subordinate and self.fronted)):
            order = "inverted"
        for i, phrase in enumerate(self.phrases):
            if i == 0:
                words += phrase.german(order, subject.german("nom"), subject.number, subject.person)
            else:
                # The second phrase shares the subject: its verb keeps its place, first of its own part or last.
                rest = phrase.german("final" if order == "final" else "second", [], subject.number, subject.person)
                words += ["und", *rest]
        if self.adverb:
            words = [*self.adverb[1].split(), *words]
        if self.subordinate:
            below = [present(self.conjunction)[1], *self.subordinate.german("final")]
            words = [*below, ",", *words] if self.fronted else [*words, ",", *below]
        return words


@dataclass
class RelativeClause:
    """`role` is "subject" (the head acts) or "object" (the head is acted upon by `subject`)."""

    role: str
    phrase: VerbPhrase
    subject: NounPhrase | None = None

    @property
    def depth(self) -> int:
        return max(self.phrase.depth, self.subject.depth if self.subject else 0)

    def english(self, head: NounPhrase) -> list[str]:
        if self.role == "subject":
            pronoun = "who" if present(head.noun).kind == "person" else "that"
            return [pronoun, *self.phrase.english(head.number, 3)]
        subject = present(self.subject)
        return ["that", *subject.english(), *self.phrase.english(subject.number, subject.person)]

    def german(self, form: str) -> list[str]:
        case = "nom" if self.role == "subject" else present(present(self.phrase.verb).case)
        pronoun = "denen" if (case, form) == ("dat", "pl") else "d" + DEFINITE[case][form]
        if self.role == "subject":
            number = "pl" if form == "pl" else "sg"
            return [",", pronoun, *self.phrase.german("final", [], number, 3), ","]
        subject = present(self.subject)
        return [",", pronoun, *self.phrase.german("final", subject.german("nom"), subject.number, subject.person), ","]


@dataclass
class Grammar:
    """
    Draws sentences.

    Args:
        rng (`random.Random`): The source of all choices.
        embedding (`float`, *optional*, defaults to 0.45): Chance of a relative, complement or adverbial clause where
            the depth allows one.
    """

    rng: random.Random
    embedding: float = 0.45

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def noun_phrase(self, depth: int, kinds: tuple[str, ...], subject: bool = False) -> NounPhrase:
        if subject and self.chance(0.15):
            return NounPhrase(pronoun=self.rng.choice(PRONOUNS))
        if self.chance(0.08):
            return NounPhrase(joined=(self.simple_phrase(0, kinds), self.simple_phrase(0, kinds)))
        return self.simple_phrase(depth, kinds)

    def simple_phrase(self, depth: int, kinds: tuple[str, ...]) -> NounPhrase:
        noun = self.rng.choice([noun for noun in NOUNS if noun.kind in kinds])
        plural = self.chance(0.35)
        choices = [determiner for determiner in DETERMINERS if not plural or determiner[1] is not None]
        phrase = NounPhrase(noun, plural, self.rng.choice([*choices, BARE_PLURAL] if plural else choices))
        if self.chance(0.35):
            phrase.adjective = self.rng.choice(ADJECTIVES)
        if depth > 0 and self.chance(self.embedding):
            phrase.relative = self.relative_clause(depth - 1, noun)
        return phrase

    def relative_clause(self, depth: int, head: Noun) -> RelativeClause:
        acts = head.kind != "thing"
        if acts and self.chance(0.5):
            return RelativeClause("subject", self.verb_phrase(depth, self.chance(0.5), complement=False))
        subject = self.noun_phrase(depth, ("person",), subject=True)
        verb = self.rng.choice(TRANSITIVE)
        phrase = VerbPhrase(verb, self.chance(0.5), negated=self.chance(0.1))
        # "that the boy looks at": the object's place stays empty, so verbs whose particle follows it are left out
        while verb.en_particle or (head.kind == "thing" and needs_living_object(verb)):
            verb = phrase.verb = self.rng.choice(TRANSITIVE)
        if not phrase.negated and self.chance(0.15):
            phrase.modal = self.rng.choice(MODALS)
        return RelativeClause("object", phrase, subject)

    def verb_phrase(self, depth: int, past: bool, complement: bool = True) -> VerbPhrase:
        draw = self.rng.random()
        if draw < 0.1:
            return VerbPhrase(None, past, predicate=self.rng.choice(ADJECTIVES), negated=self.chance(0.2))
        if complement and depth > 0 and draw < 0.1 + 0.5 * self.embedding:
            return VerbPhrase(self.rng.choice(SENTENTIAL), past, complement=self.clause(depth - 1, adjuncts=False))
        if draw < 0.45:
            phrase = VerbPhrase(self.rng.choice(INTRANSITIVE), past)
        else:
            verb = self.rng.choice(TRANSITIVE)
            kinds = ("person", "animal") if needs_living_object(verb) else ("person", "animal", "thing")
            phrase = VerbPhrase(verb, past, object=self.noun_phrase(depth, kinds))
        if self.chance(0.2):
            phrase.modal = self.rng.choice(MODALS)
        elif self.chance(0.15):
            phrase.negated = True
        # After a relative clause, place or second verb could belong to either clause: English would be ambiguous.
        if phrase.is_closed and self.chance(0.2):
            phrase.place = self.place()
        return phrase

    def place(self) -> tuple[list[str], list[str]]:
        """A prepositional phrase in both languages."""
        if self.chance(0.6):
            noun = self.rng.choice(PLACES)
            german = ["im"] if noun.gender != "f" else ["in", "der"]
            return ["in", "the", noun.en], [*german, german_noun(noun, False, "dat")]
        english, preposition, case = self.rng.choice(PREPOSITIONS)
        phrase = self.simple_phrase(0, ("person", "animal"))
        return [english, *phrase.english()], [preposition, *phrase.german(case)]

    def clause(self, depth: int, adjuncts: bool = True) -> Clause:
        subject = self.noun_phrase(depth, ("person", "animal"), subject=True)
        past = self.chance(0.5)
        phrases = [self.verb_phrase(depth, past)]
        if phrases[0].complement is None and phrases[0].is_closed and self.chance(0.12):
            phrases.append(self.verb_phrase(0, past, complement=False))
        clause = Clause(subject, phrases)
        if adjuncts and depth > 0 and phrases[-1].complement is None and self.chance(0.4 * self.embedding):
            clause.conjunction = self.rng.choice(CONJUNCTIONS)
            clause.subordinate = self.clause(depth - 1, adjuncts=False)
            clause.fronted = self.chance(0.5)
        elif adjuncts and self.chance(0.2):
            clause.adverb = self.rng.choice(ADVERBS)
        return clause

    def sentence(self, max_depth: int) -> Pair:
        clauses = [self.clause(max_depth)]
        words = clauses[0].english(), clauses[0].german()
        if self.chance(0.1):
            clauses.append(self.clause(0, adjuncts=False))
            english, german = self.rng.choice([("but", "aber"), ("and", "und")])
            words = (
                [*words[0], ",", english, *clauses[1].english()],
                [*words[1], ",", german, *clauses[1].german()],
            )
        return Pair(write(words[0]), write(words[1]), max(clause.depth for clause in clauses))


class Pair(NamedTuple):
    """An English sentence, its German translation, and the depth of its clauses (0: no subordinate clause)."""

    en: str
    de: str
    depth: int


def write(words: list[str]) -> str:
    """Words as a sentence: one comma where several meet, none before the full stop, first letter upper-case."""
    kept: list[str] = []
    for word in words:
        if word == "," and kept and kept[-1] == ",":
            continue
        kept.append(word)
    if kept[-1] == ",":
        kept.pop()
    text = " ".join(kept).replace(" ,", ",")
    return text[0].upper() + text[1:] + "."


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
    The corpus as lists of pairs; the same arguments give the same corpus on every machine.

    Args:
        train, validation, test, test_deep (`int`): Sentence pairs of each split.
        max_depth (`int`, *optional*, defaults to 2): Deepest nesting of clauses in train, validation and test.
        deep_depth (`int`, *optional*, defaults to 4): Deepest nesting in `test_deep`, whose sentences are all deeper
            than `max_depth`.
        seed (`int`, *optional*, defaults to 1): Source of all choices.

    Returns:
        Splits `"train"`, `"validation"`, `"test"`, `"test_deep"`; no sentence, on either side, is in two of them or
        twice in one.

    Raises:
        ValueError: A number is negative or not whole, `deep_depth` is not above `max_depth`, or the grammar is too
            small for the sizes asked for.
    """
    sizes = {"train": train, "validation": validation, "test": test, "test_deep": test_deep}
    for name, value in {**sizes, "max_depth": max_depth, "deep_depth": deep_depth}.items():
        check_value(name, value, int, Range(least=0))
    check_value("seed", seed, int)
    if deep_depth <= max_depth or max_depth < 0:
        raise UserError(
            f"deep_depth={deep_depth} must be above max_depth={max_depth}, and max_depth at least 0: the deep test "
            "holds sentences deeper than any in training."
        )
    grammar = Grammar(random.Random(seed))
    seen: set[str] = set()

    def draw(count: int, depth: int, above: int) -> list[Pair]:
        pairs: list[Pair] = []
        tries = 0
        while len(pairs) < count:
            tries += 1
            if tries > 200 * count + 10000:
                raise UserError(
                    f"The grammar gave only {len(pairs)} new sentences of depth {above + 1} to {depth} in {tries} "
                    f"tries, {count} were asked for. Remedy: ask for fewer, or allow more depth."
                )
            pair = grammar.sentence(depth)
            if pair.depth <= above or pair.en in seen or pair.de in seen:
                continue
            seen.update((pair.en, pair.de))
            pairs.append(pair)
        return pairs

    held_out = {
        "validation": draw(validation, max_depth, -1),
        "test": draw(test, max_depth, -1),
        "test_deep": draw(test_deep, deep_depth, max_depth),
    }
    return {"train": draw(train, max_depth, -1), **held_out}
