"""The generated corpus: every sentence of it stays."""

import hashlib

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


def test_too_small_a_grammar_ends(monkeypatch):
    monkeypatch.setattr(Grammar, "sentence", lambda *_: Pair("One.", "Eins.", 0))
    with rejects("too few sentences"):
        generate_corpus(100, 1, 1, 0)
