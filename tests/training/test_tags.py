"""Tags of directions and corpora, mixed corpora, and test sets by name."""

import json
from pathlib import Path
from types import SimpleNamespace

import foreign_models as foreign
import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from test_kills import PAIRS, tiny
from transformers import AutoTokenizer
from user_errors import rejects

import recnmt_hf
from recnmt_hf._plain_text import encode_plain
from recnmt_hf.data.corpora import Corpus
from recnmt_hf.data.text import read_lines, read_tsv
from recnmt_hf.data.tokenization import TOKENIZER_TYPES, split_tags, tag_ids, train_tokenizer
from recnmt_hf.training.evidence import Evidence
from recnmt_hf.training.inputs import mix
from recnmt_hf.training.run import train


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The pairs in two files, and the first five in two others."""
    folder = tmp_path_factory.mktemp("directions")
    pairs = [pair for _, pair in read_tsv(PAIRS["tsv"])]
    for name, part in (("all", pairs), ("few", pairs[:5])):
        (folder / f"{name}.en").write_text("".join(f"{pair.source}\n" for pair in part))
        (folder / f"{name}.de").write_text("".join(f"{pair.target}\n" for pair in part))
    return folder


def corpus(folder, name, source, target, **tags):
    return {"source": str(folder / f"{name}.{source}"), "target": str(folder / f"{name}.{target}"), **tags}


def both_ways(files, folder, **sections):
    """One model for two directions, the second one with fewer pairs; the tag says the language of the target."""
    back = corpus(files, "few", "de", "en", source_tag=">>en<<")
    corpora = {"train": [corpus(files, "all", "en", "de", source_tag=">>de<<"), back], "validation": [back]}
    plan = {
        "data": {**corpora, "temperature": 3.0, "cache_dir": str(folder / "data")},
        "tokenizer": {"kind": "word", "vocab_size": 80, "tags": [">>de<<", ">>en<<"]},
        "test": {"back": back},
    }
    return tiny(**{name: {**values, **sections.pop(name, {})} for name, values in plan.items()}, **sections)


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_tags_stay_whole(kind, tmp_path):
    """In every kind of tokenizer, saved and loaded; control tokens remain text."""
    texts = ["the dog sleeps .", "a >> de << <bt> s"] * 9
    trained = train_tokenizer(texts, kind, 1400 if kind == "bpe" else 60, tags=[">>de<<", "<bt>"])
    trained.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = encode_plain(tokenizer, ">>de<< the <bt> dog </s>")["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[0] == ">>de<<" and tokens.count("<bt>") == 1 and tokens.count("</s>") == 1
    assert tag_ids(tokenizer) == {ids[0], ids[tokens.index("<bt>")]} and len(tokenizer) <= 1400
    plain = encode_plain(tokenizer, "the dog")["input_ids"]
    assert encode_plain(tokenizer, ">>de<< the dog")["input_ids"] == [ids[0], *plain]
    assert split_tags(">>de<< <bt> the dog >>de<<", tokenizer) == (">>de<< <bt>", "the dog >>de<<")


def test_two_directions_by_tokens_of_languages(files, tmp_path, monkeypatch):
    """Validation and test sets are translated in the directions of their corpora, the first being the default."""
    texts = [text for name in ("all.en", "all.de") for text in read_lines(files / name)]
    foreign.nllb(tmp_path / "nllb", texts)
    back = corpus(files, "few", "de", "en", source_lang="deu_Latn", target_lang="eng_Latn")
    corpora = [corpus(files, "few", "en", "de"), back]
    recipe = tiny(
        data={"source_lang": "eng_Latn", "target_lang": "deu_Latn", "train": corpora, "validation": corpora},
        tokenizer={"source": str(tmp_path / "nllb"), "joint": True},
        training={"bleu_samples": 10, "eval_steps": 4},
        test={"unseen": corpora, "back": back},
    )
    calls, own = [], recnmt_hf.Translator.translate

    def translate(translator, sentences, options, *args, **kwargs):
        calls.append((options.source_lang, options.target_lang, len(sentences)))
        return own(translator, sentences, options, *args, **kwargs)

    monkeypatch.setattr(recnmt_hf.Translator, "translate", translate)
    train(recipe, tmp_path / "run")
    there, back_again = ("eng_Latn", "deu_Latn", 5), ("deu_Latn", "eng_Latn", 5)
    assert calls == [there, back_again] * 2 + [back_again]
    translator = recnmt_hf.Translator.from_pretrained(tmp_path / "run/model")
    direction = translator.codec.direction()
    assert (direction.source, direction.target) == ("eng_Latn", "deu_Latn")


def test_two_directions(files, tmp_path):
    """Tags reach the model, corpora are mixed, resuming is exact, and the command line's user writes the tag."""
    train(both_ways(files, tmp_path), tmp_path / "run")
    evidence = Evidence.load(tmp_path / "run/model")
    counts = evidence.data["pairs_of_corpora"]
    assert sum(counts) == evidence.data["training_pairs"] and counts[0] >= 20 and counts[1] > 5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    english, german = (encode_plain(tokenizer, tag)["input_ids"][0] for tag in (">>en<<", ">>de<<"))
    translator = recnmt_hf.Translator.from_pretrained(tmp_path / "run/model")
    assert translator.encode_source(">>en<< Der Hund schläft.").ids[0] == english != german

    train(both_ways(files, tmp_path, training={"max_steps": 2}), tmp_path / "again")
    train(both_ways(files, tmp_path), tmp_path / "again", resume=True)
    one, other = (load_file(tmp_path / name / "model/model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with rejects(field="data.temperature"):
        train(both_ways(files, tmp_path, data={"temperature": 1.0}), tmp_path / "again", resume=True)
    with rejects(field="data.train[1].source_tag"):  # which the tokenizer does not have
        train(both_ways(files, tmp_path, tokenizer={"tags": [">>de<<"]}), tmp_path / "other")


def test_tags_of_targets(files, tmp_path):
    """Translations of a test set begin with the tag, which their text does not have."""
    tagged = {"target_tag": ">>de<<"}
    plan = both_ways(
        files,
        tmp_path,
        data={"train": [corpus(files, "all", "en", "de", **tagged)], "validation": [corpus(files, "few", "en", "de")]},
        tokenizer={"joint": False},
    )
    plan.test = {"test": [Corpus(**corpus(files, "few", "en", "de", **tagged))]}
    train(plan, tmp_path / "run")
    translator = recnmt_hf.Translator.from_pretrained(tmp_path / "run/model")
    tag = translator.encode_target(">>de<<").ids[0]
    hypothesis = translator("The dog sleeps.", ">>de<<", max_length_extra=2)[0].hypotheses[0]
    assert hypothesis.tokens[0] == tag and ">>de<<" not in hypothesis.text
    assert ">>de<<" not in (tmp_path / "run/model-test.de").read_text()
    assert "data.train" not in json.dumps(Evidence.load(tmp_path / "run/model").data)


def test_validation_decodes_as_tests_do(files, tmp_path, monkeypatch):
    """The same pairs, of two directions with their tags, reach the search with the same prefixes and options."""
    corpora = [corpus(files, "few", "en", "de", target_tag=tag) for tag in (">>de<<", ">>en<<")]
    plan = both_ways(
        files,
        tmp_path,
        data={"train": corpora, "validation": corpora},
        training={"bleu_samples": 100, "bleu_beams": 2, "max_steps": 1, "eval_steps": 1},
        decoding={"beams": 2, "length_penalty": 2.0, "on_long": "split", "generate": {"no_repeat_ngram_size": 2}},
        average={"count": 1},
    )
    plan.test = {name: [Corpus(**one)] for name, one in zip("ab", corpora, strict=True)}
    searches, search = [], recnmt_hf.Translator.search
    spy = lambda self, prepared, *rest: searches.append((prepared, rest[0])) or search(self, prepared, *rest)  # noqa: E731
    monkeypatch.setattr(recnmt_hf.Translator, "search", spy)
    train(plan, tmp_path / "run")
    (validation, options), *tests = [one for one in searches if one[0][0].text != "abcdef"]  # a trial of the options
    rows = [[(row.pieces, row.openings) for row in prepared] for prepared in (validation, tests[0][0] + tests[1][0])]
    assert rows[0] == rows[1] and [own for _, own in tests] == [options] * 2
    assert [list(map(len, row.openings)) for row in validation] == [[1]] * 10
    assert validation[0].openings != validation[9].openings


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.9), (2.0, 0.75), (1000.0, 0.5)])
def test_mixed_corpora_follow_the_temperature(temperature, share):
    parts = [Dataset.from_dict({"x": list(range(n))}) for n in (900, 100)]
    data = mix(parts, temperature, seed=1)
    counts = np.bincount(data["corpus"][:])
    assert counts[0] / counts.sum() == pytest.approx(share, abs=0.03)
    for number, part in enumerate(parts):  # each pair at least once
        drawn = {x for x, of in zip(data["x"][:], data["corpus"][:], strict=True) if of == number}
        assert drawn == set(part["x"][:])
    assert mix(parts, temperature, seed=1)["x"][:] == data["x"][:] != mix(parts, temperature, seed=2)["x"][:]


def test_test_sets_by_name(monkeypatch, tmp_path):
    """Here one of sacrebleu whose files are on this machine, with two references."""
    from sacrebleu.dataset import DATASETS

    texts = ("The dog sleeps.\nThe cat sleeps.\n", "Der Hund schläft.\nDie Katze schläft.\n", "Hund.\nKatze.\n")
    source, *references = (str(tmp_path / name) for name in ("src", "ref", "ref-2"))
    for path, text in zip((source, *references), texts, strict=True):
        Path(path).write_text(text)
    files = {"get_source_file": lambda pair: source, "get_reference_files": lambda pair: references}
    monkeypatch.setitem(DATASETS, "own99", SimpleNamespace(langpairs={"en-de": []}, **files))
    assert list(recnmt_hf.Recipe(test=[{"sacrebleu": "own99"}, {"sacrebleu": "wmt21/A"}]).test) == ["own99", "wmt21_A"]
    train(tiny(tmp_path, test={"test": {"sacrebleu": "own99"}}), tmp_path / "run")
    score = next(test for test in Evidence.load(tmp_path / "run/model").tests if test.name == "test")
    assert (score.sentences, score.references, score.signature.partition("|")[0]) == (2, 2, "nrefs:2")
    pairs = list(Corpus(sacrebleu="own99").pairs("eng_Latn", "deu_Latn"))
    assert pairs[1] == ("The cat sleeps.", "Die Katze schläft.")
