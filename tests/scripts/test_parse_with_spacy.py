"""The script that writes trees with spaCy, run with a stand-in for spaCy; its files are read as a corpus."""

import importlib
import sys
import types

from recnmt_hf.data import Corpus, ParsedSentence, load_pairs


class Word:
    """A word as spaCy has it; the second word of a sentence is its root."""

    def __init__(self, text, i, sentence):
        self.text, self.i, self.sentence = text, i, sentence

    @property
    def head(self):
        return self.sentence[min(1, len(self.sentence) - 1)]

    @property
    def dep_(self):
        return "ROOT" if self.head.i == self.i else "dep"

    def __str__(self):
        return self.text


def parse(text):
    sentence = []
    sentence += [Word(word, i, sentence) for i, word in enumerate(text.replace(".", " .").split())]
    return sentence


def test_files_are_a_corpus(tmp_path, monkeypatch):
    pipeline = types.SimpleNamespace(pipe=lambda texts: map(parse, texts))
    spacy = types.SimpleNamespace(load=lambda name, exclude: pipeline)
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    (tmp_path / "a.en").write_text("The  dog sleeps.\n\n\u200b\nYes.\n")
    (tmp_path / "a.de").write_text("Der Hund schläft.\nLeer\nLeer\nJa.\n")
    words, trees = f"{tmp_path}/a.words.en", f"{tmp_path}/a.conllu"
    importlib.import_module("parse_with_spacy").main([f"{tmp_path}/a.en", words, trees, "--pipeline", "some_pipeline"])
    pairs = list(load_pairs(Corpus(words, f"{tmp_path}/a.de", source_trees=trees), "en", "de", "skip"))
    assert [str(pair.source) for pair in pairs] == ["The dog sleeps .", "Yes ."]
    assert all(isinstance(pair.source, ParsedSentence) for pair in pairs)
    assert [pair.source.heads for pair in pairs] == [(2, 0, 2, 2), (2, 0)]
    assert pairs[0].source.relations == ("dep", "ROOT", "dep", "dep")
