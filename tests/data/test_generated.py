"""The generated corpus: deterministic, disjoint, agreeing, and deep where it says so."""

import hashlib
import re

import pytest
from user_errors import rejects

from recnmt_hf.data import generated_lexicon as lexicon
from recnmt_hf.data.generated import (
    Grammar,
    NounPhrase,
    generate_corpus,
    generate_split,
    join_clause,
    noun_phrase,
    predicate,
    relative_clause,
    write,
)


def noun(name):
    return next(entry for entry in lexicon.NOUNS if entry.en == name)


def verb(name):
    return next(entry for entry in lexicon.TRANSITIVE + lexicon.INTRANSITIVE if entry.en == name)


def words(text):
    return " ".join(text.split())


THE, A = lexicon.DETERMINERS[0], next(d for d in lexicon.DETERMINERS if d.singular == "a")
PRONOUNS = {english: NounPhrase(english, {"nom": german}, *more) for english, german, *more in lexicon.PRONOUNS}


def test_the_corpus_stays_as_it_is():
    """Figures that were measured on it hold only while every sentence of it stays."""
    digest = hashlib.sha256()
    for split, pairs in generate_corpus(2000, 200, 200, 200).items():
        digest.update("".join(f"{split}\t{pair.en}\t{pair.de}\t{pair.depth}\n" for pair in pairs).encode())
    assert digest.hexdigest() == "fb48a0ece6a8bc34e4111d6b6bb8dd2adce298f659cad0190b359ff240722e9f"


def test_one_split_is_that_of_the_corpus():
    """Although only the splits that are drawn before it are made as well."""
    whole = generate_corpus(seed=3)
    for name, size in {"validation": 20, "test": 600, "test_deep": 30, "train": 40}.items():
        assert generate_split(name, size, 3) == generate_corpus(**{"train": 0, name: size}, seed=3)[name]
    assert generate_split("train", 100, 3) == whole["train"][:100]


def test_splits_share_no_sentence_and_have_their_depths():
    corpus = generate_corpus(3000, 200, 200, 200)
    assert [len(corpus[split]) for split in ("train", "validation", "test", "test_deep")] == [3000, 200, 200, 200]
    for side in ("en", "de"):
        sentences = [getattr(pair, side) for pairs in corpus.values() for pair in pairs]
        assert len(sentences) == len(set(sentences))
    assert {pair.depth for split in ("train", "validation", "test") for pair in corpus[split]} == {0, 1, 2}
    assert {pair.depth for pair in corpus["test_deep"]} == {3, 4}


def test_sentences_are_written_well():
    for pair in generate_corpus(2000, 5, 5, 200)["train"]:
        for text in (pair.en, pair.de):
            assert re.fullmatch(r"[A-ZÄÖÜ][^.]*\.", text), text
            assert not re.search(r",\s*,| ,|  |,\.", text), text
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", pair.en), pair.en


@pytest.mark.parametrize(
    "article, noun_name, case, plural, expected",
    [
        (THE, "dog", "nom", False, "der alte Hund"),
        (THE, "dog", "acc", False, "den alten Hund"),
        (THE, "woman", "dat", False, "der alten Frau"),
        (THE, "child", "dat", True, "den alten Kindern"),
        (THE, "boy", "acc", False, "den alten Jungen"),
        (THE, "student", "dat", False, "dem alten Studenten"),
        (A, "dog", "nom", False, "ein alter Hund"),
        (A, "child", "acc", False, "ein altes Kind"),
        (A, "woman", "dat", False, "einer alten Frau"),
    ],
)
def test_articles_adjectives_and_nouns_agree(article, noun_name, case, plural, expected):
    assert words(noun_phrase(noun(noun_name), plural, article, ("old", "alt")).de[case]) == expected


def test_verbs_are_second_first_or_last_and_separable_ones_split():
    teacher, dog = (noun_phrase(noun(name), False, THE) for name in ("teacher", "dog"))
    calls = predicate(teacher, verb("call"), False, dog)
    for more, expected in (
        ({}, "der Lehrer ruft den Hund an"),
        ({"adverb": ("today", "heute")}, "heute ruft der Lehrer den Hund an"),
        ({"order": "final"}, "der Lehrer den Hund anruft"),
    ):
        assert words(join_clause(teacher, [calls], **more).de) == expected
    cat = noun_phrase(noun("cat"), False, THE)
    sleeps = join_clause(cat, [predicate(cat, verb("sleep"), True)], "final")
    when = sleeps._replace(en=f"when {sleeps.en}", de=f"wenn {sleeps.de}")
    teachers = noun_phrase(noun("teacher"), True, THE)
    clause = join_clause(teachers, [predicate(teachers, verb("get"), False)], subordinate=when, fronted=True)
    assert write(clause.de) == "Wenn die Katze schlief, stehen die Lehrer auf."
    assert write(clause.en) == "When the cat slept, the teachers get up."
    bag = noun_phrase(noun("bag"), False, THE)
    collect = predicate(PRONOUNS["I"], verb("collect"), False, bag, modal=lexicon.MODALS[0])
    assert words(collect.german("second", "ich")) == "ich kann die Tasche abholen"
    assert words(collect.german("final", "ich")) == "ich die Tasche abholen kann"


def test_relative_pronouns_take_the_case_of_their_clause():
    def relative(head, plural, name):
        part = predicate(PRONOUNS["I"], verb(name), False)
        clause = relative_clause(noun(head), plural, verb(name).case, PRONOUNS["I"], part)
        phrase = noun_phrase(noun(head), plural, THE, None, clause)
        assert phrase.depth == 1
        return write(phrase.de["nom"]), write(phrase.en)

    assert relative("dog", False, "see") == ("Der Hund, den ich sehe.", "The dog that I see.")
    assert relative("child", True, "help")[0] == "Die Kinder, denen ich helfe."
    assert relative("woman", False, "thank")[0] == "Die Frau, der ich danke."


def test_english_verbs_agree_and_negate():
    dog = noun_phrase(noun("dog"), False, THE)
    she, they = (predicate(PRONOUNS[name], verb("see"), False, dog, negated=True) for name in ("she", "they"))
    assert words(she.en) == "does not see the dog"
    assert words(they.en) == "do not see the dog"
    assert words(they.german("second", "sie")) == "sie sehen den Hund nicht"


def test_too_small_a_grammar_is_named(monkeypatch):
    monkeypatch.setattr(Grammar, "noun_phrase", lambda *a, **k: noun_phrase(noun("dog"), False, THE))
    monkeypatch.setattr(Grammar, "verb_phrase", lambda *a, **k: predicate(PRONOUNS["he"], verb("sleep"), False))
    with rejects("The grammar has too few sentences of"):
        generate_corpus(100, 1, 1, 0, max_depth=0, deep_depth=1)
