"""The generated corpus: deterministic, disjoint, agreeing, and deep where it says so."""

import hashlib
import re

from user_errors import rejects

from recnmt_hf.data.generated import Grammar, Pair, generate_corpus, generate_split


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


def test_german_forms_agree():
    """Separable verbs split, verbs of subordinate clauses are last, relative pronouns take the case of their clause."""
    german = " ".join(pair.de for pairs in generate_corpus(3000, 5, 5, 200).values() for pair in pairs)
    for form in ("ruft", "anruft", "denen", "dem alten", "ein alter", "ein altes"):
        assert form in german, form


def test_too_small_a_grammar_ends(monkeypatch):
    monkeypatch.setattr(Grammar, "sentence", lambda *_: Pair("One.", "Eins.", 0))
    with rejects("too few sentences"):
        generate_corpus(100, 1, 1, 0)
