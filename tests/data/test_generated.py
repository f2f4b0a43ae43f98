"""The generated corpus: deterministic, disjoint, agreeing, and deep where it says so."""

import hashlib
import re

import pytest

from recnmt_hf.data import generated
from recnmt_hf.data import generated_lexicon as lexicon
from recnmt_hf.data.generated import Clause, Grammar, NounPhrase, RelativeClause, VerbPhrase, generate_corpus
from recnmt_hf.data.generated_lexicon import Verb


def noun(name):
    return next(entry for entry in lexicon.NOUNS if entry.en == name)


def verb(name):
    return next(entry for entry in lexicon.TRANSITIVE + lexicon.INTRANSITIVE if entry.en == name)


THE, A = lexicon.DETERMINERS[0], next(d for d in lexicon.DETERMINERS if d[0] == "a")


def test_deterministic_by_seed():
    assert generate_corpus(50, 5, 5, 5, seed=3) == generate_corpus(50, 5, 5, 5, seed=3)
    assert generate_corpus(50, 5, 5, 5, seed=3) != generate_corpus(50, 5, 5, 5, seed=4)


def test_the_corpus_stays_as_it_is():
    """Figures that were measured on it hold only while every sentence of it stays."""
    digest = hashlib.sha256()
    for split, pairs in generate_corpus(2000, 200, 200, 200).items():
        digest.update("".join(f"{split}\t{pair.en}\t{pair.de}\t{pair.depth}\n" for pair in pairs).encode())
    assert digest.hexdigest() == "fb48a0ece6a8bc34e4111d6b6bb8dd2adce298f659cad0190b359ff240722e9f"


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
    "noun_name, case, plural, expected",
    [
        ("dog", "nom", False, "der alte Hund"),
        ("dog", "acc", False, "den alten Hund"),
        ("dog", "dat", False, "dem alten Hund"),
        ("woman", "acc", False, "die alte Frau"),
        ("woman", "dat", False, "der alten Frau"),
        ("child", "nom", False, "das alte Kind"),
        ("child", "dat", True, "den alten Kindern"),
        ("boy", "acc", False, "den alten Jungen"),
        ("student", "dat", False, "dem alten Studenten"),
    ],
)
def test_articles_adjectives_and_nouns_agree(noun_name, case, plural, expected):
    phrase = NounPhrase(noun(noun_name), plural, THE, ("old", "alt"))
    assert " ".join(phrase.german(case)) == expected


@pytest.mark.parametrize(
    "noun_name, case, expected",
    [("dog", "nom", "ein alter Hund"), ("child", "acc", "ein altes Kind"), ("woman", "dat", "einer alten Frau")],
)
def test_indefinite_articles_agree(noun_name, case, expected):
    assert " ".join(NounPhrase(noun(noun_name), False, A, ("old", "alt")).german(case)) == expected


def test_verbs_stand_second_first_or_last_and_separable_ones_split():
    def clause(**more):
        return Clause(
            NounPhrase(noun("teacher"), False, THE),
            [VerbPhrase(verb("call"), False, NounPhrase(noun("dog"), False, THE))],
            **more,
        )

    assert clause().german() == ["der", "Lehrer", "ruft", "den", "Hund", "an"]
    assert clause(adverb=("today", "heute")).german() == ["heute", "ruft", "der", "Lehrer", "den", "Hund", "an"]
    assert clause().german("final") == ["der", "Lehrer", "den", "Hund", "anruft"]
    sleeps = Clause(NounPhrase(noun("cat"), False, THE), [VerbPhrase(verb("sleep"), True)])
    fronted = Clause(
        NounPhrase(noun("teacher"), True, THE),
        [VerbPhrase(verb("get"), False)],
        conjunction=("when", "wenn"),
        subordinate=sleeps,
        fronted=True,
    )
    assert generated.write(fronted.german()) == "Wenn die Katze schlief, stehen die Lehrer auf."
    assert generated.write(fronted.english()) == "When the cat slept, the teachers get up."
    modal = VerbPhrase(verb("collect"), False, NounPhrase(noun("bag"), False, THE), modal=lexicon.MODALS[0])
    assert " ".join(modal.german("second", ["ich"], "sg", 1)) == "ich kann die Tasche abholen"
    assert " ".join(modal.german("final", ["ich"], "sg", 1)) == "ich die Tasche abholen kann"


def test_relative_pronouns_take_the_case_of_their_clause():
    def relative(head, plural, name):
        phrase = NounPhrase(noun(head), plural, THE)
        subject = NounPhrase(pronoun=lexicon.PRONOUNS[0])
        phrase.relative = RelativeClause("object", VerbPhrase(verb(name), False), subject)
        return generated.write(phrase.german("nom")), generated.write(phrase.english())

    assert relative("dog", False, "see") == ("Der Hund, den ich sehe.", "The dog that I see.")
    assert relative("child", True, "help")[0] == "Die Kinder, denen ich helfe."
    assert relative("woman", False, "thank")[0] == "Die Frau, der ich danke."


def test_english_verbs_agree_and_negate():
    phrase = VerbPhrase(verb("see"), False, NounPhrase(noun("dog"), False, THE), negated=True)
    assert " ".join(phrase.english("sg", 3)) == "does not see the dog"
    assert " ".join(phrase.english("pl", 3)) == "do not see the dog"
    assert " ".join(phrase.german("second", ["sie"], "pl", 3)) == "sie sehen den Hund nicht"


def test_no_word_of_the_german_side_is_unknown():
    """Every verb form and noun form comes from the lexicon: a typing error would show as an unknown stem."""
    forms = {
        form
        for entry in vars(lexicon).values()
        if isinstance(entry, list)
        for verb in entry
        if isinstance(verb, Verb)
        for form in (verb.de, verb.de_first, verb.de_third, verb.de_past)
    }
    assert all(re.fullmatch(r"[a-zäöüß]+", form) for form in forms)


def test_impossible_demands_are_refused():
    with pytest.raises(ValueError, match=r"deep_depth=2 must be above max_depth=2"):
        generate_corpus(1, 1, 1, 1, max_depth=2, deep_depth=2)


def test_too_small_a_grammar_is_named(monkeypatch):
    monkeypatch.setattr(Grammar, "noun_phrase", lambda *a, **k: NounPhrase(noun("dog"), False, THE))
    monkeypatch.setattr(Grammar, "verb_phrase", lambda *a, **k: VerbPhrase(verb("sleep"), False))
    with pytest.raises(ValueError, match=r"only \d+ new sentences of depth 0 to 0.*Remedy"):
        generate_corpus(100, 1, 1, 0, max_depth=0, deep_depth=1)


@pytest.mark.parametrize("name", ["train", "validation", "test", "test_deep", "max_depth", "deep_depth"])
@pytest.mark.parametrize("value", [-1, 1.5, "5", True])
def test_wrong_sizes_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not allowed; it must be a whole number of at least 0"):
        generate_corpus(**{"train": 1, "validation": 1, "test": 1, "test_deep": 1, name: value})
