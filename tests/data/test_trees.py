"""Dependency trees: CoNLL-U and columns of corpora, relations, the mapping to tokens, padding."""

import copy
import gzip
import json
import pickle
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from user_errors import rejects

from recnmt_hf import prepare_dataset, train_tokenizer
from recnmt_hf.data import Corpus, ParsedSentence, Relations, TreeCollator, TreeEncoder, load_pairs, read_conllu
from recnmt_hf.data.corpora import load_test_set
from recnmt_hf.data.records import Sentence, TokenTree


def row(number, form, head, relation="dep"):
    return "\t".join([str(number), form, "_", "_", "_", "_", str(head), relation, "_", "_"])


def block(*rows):
    return "".join(f"{line}\n" for line in rows) + "\n"


DOG = block("# text = The dog sleeps", row(1, "The", 2, "det"), row(2, "dog", 3, "nsubj"), row(3, "sleeps", 0, "root"))
# A range, an empty node and a word with a space.
RANGE = block(
    "# sent_id = 2",
    row("1-2", "don't", "_", "_"),
    row(1, "do", 2, "aux:x"),
    row(2, "n't", 0, "root"),
    row("2.1", "see", "_", "_"),
    row(3, "10 000", 2, "obj"),
)
BIRD = block(row(1, "Birds", 0, "root"))


@pytest.fixture
def files(tmp_path):
    """A corpus of three lines, of which the second is blank, with the trees of the others."""
    (tmp_path / "a.en").write_text("A dog sleeps\n\ndo n't 10 000\n")
    (tmp_path / "a.de").write_text("Der Hund schläft\nLeer\nNicht\n")
    (tmp_path / "a.conllu").write_text(DOG + "\n" + RANGE)
    return tmp_path


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n\n"])
@pytest.mark.parametrize("name", ["a.conllu", "a.conllu.gz"])
def test_conllu(tmp_path, name, ends, last):
    text = (DOG + "\n\n" + RANGE + BIRD).rstrip("\n") + last
    content = text.replace("\n", ends).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = list(read_conllu(tmp_path / name))
    assert [number for number, _ in found] == [2, 10, 15]
    sentences = [sentence for _, sentence in found]
    assert list(map(str, sentences)) == ["The dog sleeps", "do n't 10 000", "Birds"]
    assert [sentence.heads for sentence in sentences] == [(2, 3, 0), (2, 0, 2), (0,)]
    assert sentences[1].words == ("do", "n't", "10 000") and sentences[1].relations == ("aux:x", "root", "obj")


# Content after a good sentence of five lines, and the line of the error.
BAD_TREES = {
    "text": ("The dog sleeps\n", 6),
    "number skipped": (row(1, "a", 0) + "\n" + row(3, "b", 1), 7),
    "no blank line": (DOG.rstrip("\n") + "\n" + BIRD, 10),
    "head missing": (row(1, "a", "_"), 6),
    "cycle": ("\n".join([row(1, "a", 0), row(2, "b", 4), row(3, "c", 1), row(4, "d", 2)]), 6),
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_bad_trees_are_rejected_with_file_and_line(tmp_path, name):
    content, line = BAD_TREES[name]
    path = tmp_path / "a.conllu"
    path.write_text(DOG + content)
    with rejects(f"{path}, line {line}: ", field=f"{path}, line {line}"):
        list(read_conllu(path))


def test_a_long_chain_and_a_long_cycle():
    ParsedSentence(["a"] * 3000, [*range(2, 3001), 0], ["x"] * 3000)
    with rejects("the heads of word"):
        ParsedSentence(["a"] * 3000, [*range(2, 3001), 1], ["x"] * 3000)


GOOD = {"words": ["a", "b"], "heads": [2, 0], "relations": ["x", "y"]}
BAD = [("words", "ab"), ("words", ["a"]), ("words", ["a", ""]), ("relations", ["x", None])]
BAD += [("heads", heads) for heads in ([-1, 0], [3, 0], [2, 1])]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_sentences(name, value):
    ParsedSentence(**GOOD)
    with rejects():
        ParsedSentence(**{**GOOD, name: value})


def test_parts_keep_the_edges_within():
    sentence = ParsedSentence(["a", "10 000", "birdsong", "c"], [2, 0, 2, 3], ["w", "x", "y", "z"])
    assert Sentence.of(sentence).public == pickle.loads(pickle.dumps(sentence)) == sentence
    assert sentence.part(0, 2) == ParsedSentence(("a", "10 000"), (2, 0), ("w", "x"))
    first, second = Sentence.of(sentence).parts(["a 10 000", "birdsong c"])
    assert (first.tree.heads, second.tree.heads) == ((2, 0), (0, 1))
    assert second.text == "birdsong c" and second.tree.relations == ("y", "z")
    # From a cut within a word on, parts have no tree.
    first, *rest = Sentence.of(sentence).parts(["a 10 000", "bird", "song c"])
    assert first.tree.heads == (2, 0) and rest == [Sentence("bird"), Sentence("song c")]
    assert Sentence("a b").parts(["a", "b"]) == [Sentence("a"), Sentence("b")]


def write(path, text):
    path.write_text(text)
    return path


def row_of(sentence):
    names = {"source_tokens": sentence.words, "source_heads": sentence.heads, "source_relations": sentence.relations}
    return {**names, "de": "Ja"}


def test_corpora_with_trees(files):
    corpus = Corpus(source=files / "a.en", target=files / "a.de", source_trees=files / "a.conllu")
    pairs = list(load_pairs(corpus, "en", "de", "skip"))
    assert [pair.source.heads for pair in pairs] == [(2, 3, 0), (2, 0, 2)] and pairs[1].target == "Nicht"
    assert str(pairs[0].source) == "A dog sleeps", "the words are those of the text"
    sources, references = load_test_set(replace(corpus, target=[files / "a.de"] * 2), "en", "de", "skip")
    assert sources[1].relations == ("aux:x", "root", "obj") and len(references) == 2
    records = list(map(row_of, sources))
    lines = write(files / "a.jsonl", "".join(f"{json.dumps(record)}\n" for record in records))
    Dataset.from_list(records).to_json(files / "set" / "train.jsonl")
    for settings in ({"jsonl": lines}, {"dataset": str(files / "set")}):
        pairs = list(load_pairs({**settings, "tree_columns": True}, "en", "de"))
        assert [pair.source for pair in pairs] == sources and pairs[0].target == "Ja"


def test_other_trees_are_another_corpus(files):
    with_trees = Corpus(source=files / "a.en", target=files / "a.de", source_trees=files / "a.conllu")
    before = with_trees.fingerprint()
    write(files / "a.conllu", DOG + RANGE.replace("obj", "iobj"))
    assert with_trees.fingerprint() != before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"a.en": "The dog\n\ndo n't 10 000\n"}, "a.en, line 1"),
        ({"a.en": "The dog sleeps\n\ndo n't 10000\n"}, "a.en, line 3"),
        ({"a.conllu": DOG}, "a.en, line 3"),
        ({"a.conllu": DOG + RANGE + BIRD}, "a.conllu, line 13"),
        ({"a.conllu": DOG + RANGE.replace("\t0\t", "\t9\t")}, "a.conllu, line 8"),
    ],
)
def test_files_that_do_not_match(files, changes, field):
    for name, text in changes.items():
        write(files / name, text)
    corpus = Corpus(source=files / "a.en", target=files / "a.de", source_trees=files / "a.conllu")
    with rejects(field=f"{files}/{field}"):
        list(load_pairs(corpus, "en", "de", "skip"))


@pytest.mark.parametrize("change", [{"source_heads": None}, {"source_tokens": "The dog sleeps"}, {"de": None}])
def test_bad_columns(tmp_path, change):
    good = row_of(ParsedSentence(["The", "dog", "sleeps"], [2, 3, 0], ["det", "nsubj", "root"]))
    path = write(tmp_path / "a.jsonl", f"{json.dumps(good)}\n{json.dumps({**good, **change})}\n")
    with rejects(f"{path}, line 2"):
        list(load_pairs({"jsonl": path, "tree_columns": True}, "en", "de"))


def test_relations_are_counted_saved_and_loaded(tmp_path):
    one = ParsedSentence(["a", "b", "c"], [0, 1, 1], ["root", "nsubj:pass", "nsubj"])
    two = ParsedSentence(["a", "b"], [0, 1], ["root", "<piece>"])
    main = Relations.count([one, "text", two, one])
    assert main.names == ("<unk>", "nsubj", "root", "<piece>")
    assert Relations.count([one, two], most=1).names == ("<unk>", "nsubj", "<piece>")
    subtypes = Relations.count([one], subtypes=True)
    assert subtypes.names == ("<unk>", "nsubj", "nsubj:pass", "root", "<piece>")
    assert Relations.load(tmp_path) is None
    for relations in (main, subtypes):
        relations.save(tmp_path)
        assert Relations.load(tmp_path) == relations and len(relations) == len(relations.names)
    write(tmp_path / "relations.json", "[")
    with rejects("relations.json", field=str(tmp_path)):
        Relations.load(tmp_path)


RELATIONS = Relations(("<unk>", "nsubj", "det", "<piece>"))
# The pieces of the last two words are single characters.
SENTENCE = ParsedSentence(["the", "dogs", "sing"], [2, 3, 0], ["det", "nsubj:x", "root"])


@pytest.fixture(scope="module")
def pieces():
    """Return a tokenizer that knows "the" and splits other words into single characters."""
    return train_tokenizer(["the"] * 50 + ["dogs", "sing"], "bpe", 17)


def test_pieces_of_words(pieces):
    tokens = TreeEncoder(pieces, RELATIONS)([SENTENCE])[0]
    assert " ".join(pieces.convert_ids_to_tokens(tokens.ids)) == "▁the ▁ d o g s ▁ s i n g </s>"
    assert tokens.tree.heads == [1, 6, 1, 1, 1, 1, -1, 6, 6, 6, 6, -1]
    assert tokens.tree.relations == [2, 1, 3, 3, 3, 3, 0, 3, 3, 3, 3, 0]
    tokens = TreeEncoder(pieces, RELATIONS, subwords="all_pieces")([SENTENCE])[0]
    assert tokens.tree.heads == [1, 6, 6, 6, 6, 6, -1, -1, -1, -1, -1, -1]
    assert tokens.tree.relations == [2, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    # The end of the sentence as the head of the root, whose relation is unknown.
    tokens = TreeEncoder(pieces, RELATIONS, root="token")([SENTENCE])[0]
    assert tokens.tree.heads == [1, 6, 1, 1, 1, 1, 11, 6, 6, 6, 6, -1]
    assert tokens.tree.relations[6] == 0
    subtypes = Relations(("<unk>", "nsubj", "nsubj:x", "<piece>"), subtypes=True)
    assert TreeEncoder(pieces, subtypes)([SENTENCE])[0].tree.relations[:2] == [0, 2]


@pytest.mark.parametrize("kind", ["bpe", "word", "space"])
def test_ids_are_those_of_the_text(kind):
    sentence = ParsedSentence(["Isn't", "</s>", "10 000", "\u200b", "A-b."], [0, 1, 1, 1, 4], ["x"] * 5)
    tokenizer = train_tokenizer(["Isn't it 10 000 </s> A-b ."], kind, 60)
    tokens = TreeEncoder(tokenizer, RELATIONS)([sentence])[0]
    assert tokens.ids == tokenizer(str(sentence))["input_ids"]
    # The fourth word has no tokens, so the fifth has no head.
    assert tokens.tree.heads[-1] == -1 and len(tokens.tree.heads) == len(tokens.tree.relations) == len(tokens)


def test_control_tokens_have_no_edges(pieces):
    tagged = copy.deepcopy(pieces)
    tagged.backend_tokenizer.post_processor = type(pieces.backend_tokenizer.post_processor)(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokens = TreeEncoder(tagged, RELATIONS)([SENTENCE])[0]
    assert tokens.tree.heads == [-1, 2, 7, 2, 2, 2, 2, -1, 7, 7, 7, 7, -1]
    assert tokens.tree.relations[0] == tokens.tree.relations[-1] == 0


def test_truncation_removes_edges_to_removed_words(pieces):
    tokens = TreeEncoder(pieces, RELATIONS)([SENTENCE])[0]
    short = tokens.truncated(4, {2})
    assert short.ids == [*tokens.ids[:3], tokens.ids[11]]
    assert short.tree == TokenTree([1, -1, 1, -1], [2, 0, 3, 0])


@pytest.mark.parametrize("keep_text", [False, True])
def test_prepared_columns(files, pieces, keep_text):
    trees = TreeEncoder(pieces, RELATIONS)
    corpora = [
        Corpus(source=files / "a.en", target=files / "a.de", source_trees=files / "a.conllu"),
        Corpus(source=files / "a.de", target=files / "a.de"),
    ]
    settings = {"on_empty": "skip", "keep_text": keep_text}
    data = prepare_dataset(corpora, "en", "de", pieces, pieces, files / "cache", trees=trees, **settings)
    sentences = [pair.source for pair in load_pairs(corpora, "en", "de", "skip")]
    for record, sentence in zip(data, sentences, strict=True):
        ids, heads = record["input_ids"], record["dependency_heads"]
        assert ids == pieces(str(sentence))["input_ids"] and record["source_length"] == len(ids) == len(heads)
        if isinstance(sentence, ParsedSentence):
            (expected,) = trees([sentence])
            assert (heads, record["dependency_relations"]) == (expected.tree.heads, expected.tree.relations)
        else:
            assert heads == [-1] * len(ids) and record["dependency_relations"] == [0] * len(ids)
        assert ("source_heads" in record) == ("source" in record) == keep_text
    # Another vocabulary of relations is other data.
    other = TreeEncoder(pieces, Relations(("<unk>", "<piece>")))
    again = prepare_dataset(corpora, "en", "de", pieces, pieces, files / "cache", trees=other, **settings)
    assert again["dependency_relations"][0] != data["dependency_relations"][0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(pieces, side):
    names = ("input_ids", "labels", "dependency_heads", "dependency_relations")
    rows = ([5, 6, 2], [5, 2], [1, -1, -1], [3, 0, 0]), ([5, 6, 7, 8, 2], [2], [3, 3, 3, -1, -1], [1, 1, 2, 0, 0])
    features = [dict(zip(names, row, strict=True)) for row in rows]
    tokenizer = copy.deepcopy(pieces)
    tokenizer.padding_side = side
    batch = TreeCollator(tokenizer)(features)
    padded = {"right": [1, -1, -1, -1, -1], "left": [-1, -1, 3, -1, -1]}[side]
    assert batch["dependency_heads"].tolist() == [padded, [3, 3, 3, -1, -1]]
    first = {"right": [3, 0, 0, 0, 0], "left": [0, 0, 3, 0, 0]}[side]
    assert batch["dependency_relations"].tolist() == [first, [1, 1, 2, 0, 0]]
    assert batch["dependency_heads"].dtype == torch.long and batch["input_ids"].shape == (2, 5)
    plain = TreeCollator(tokenizer)([{name: f[name] for name in names[:2]} for f in features])
    assert set(plain) == {"input_ids", "attention_mask", "labels"}
