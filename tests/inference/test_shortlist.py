"""Lexical shortlists: which tokens a batch may use, the search with them, files of Marian, mistakes."""

import gzip
from pathlib import Path

import pytest
import torch
from user_errors import rejects

import recnmt_hf
from recnmt_hf.data.records import Tokens
from recnmt_hf.inference.model_settings import end_ids
from recnmt_hf.inference.shortlist import Shortlist, output_weight
from recnmt_hf.inference.word_alignment import write_shortlist


SETTINGS = {"max_length_factor": 0.6, "max_length_extra": 6}


@pytest.fixture(scope="module", params=["nmt_transformer", "vrnmt"])
def translator(request, random_translator):
    """A Transformer and a recurrent decoder; the output layer is that of all families."""
    return random_translator(request.param)


@pytest.fixture(scope="module")
def every_token(translator, tmp_path_factory):
    """A file that gives every target token for every source token."""
    path = tmp_path_factory.mktemp("lists") / "all.txt"
    names = translator.target_tokenizer.get_vocab(), translator.tokenizer.get_vocab()
    path.write_text("".join(f"{target} {source} 0.5\n" for target in names[0] for source in names[1]))
    return str(path)


@pytest.fixture
def sentences(corpus):
    return [pair.en for pair in corpus["test"][:8]]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_shortlist_of_all_tokens_changes_nothing(translator, every_token, sentences, beams):
    settings = {**SETTINGS, "beams": beams, "shortlist_first": 10**6, "shortlist_best": 10**6}
    expected = [one.text for one in translator(sentences, **SETTINGS, beams=beams)]
    assert [one.text for one in translator(sentences, **settings, shortlist=every_token)] == expected


def test_quantized_models(tiny_folder, tmp_path):
    """The output layer of the shortlist computes in float32."""
    translator = recnmt_hf.Translator.from_pretrained(tiny_folder, quantization="int8")
    head = translator.model.lm_head
    weight, bias = output_weight(head)
    states = torch.randn(5, weight.shape[1])
    torch.testing.assert_close(torch.nn.functional.linear(states, weight, bias), head(states), atol=0.05, rtol=0.05)
    tokens = translator.target_tokenizer.get_vocab(), translator.tokenizer.get_vocab()
    path = tmp_path / "all.txt"
    path.write_text("".join(f"{target} {source} 0.5\n" for target in tokens[0] for source in tokens[1]))
    found = translator("The dog sleeps.", **SETTINGS, beams=2, shortlist=str(path), shortlist_best=10**6)
    assert found[0].hypotheses[0].tokens


@pytest.mark.parametrize("settings", [{"beams": 1}, {"beams": 3}, {"beams": 3, "no_repeat_ngram_size": 2}])
def test_translations_have_only_the_tokens_of_the_list(translator, every_token, sentences, settings, tmp_path):
    """Also with processors of logits, which see the whole vocabulary, and prefixes, whose tokens are always allowed."""
    vocabulary, special = translator.target_tokenizer.get_vocab(), set(translator.target_tokenizer.all_special_ids)
    allowed = {token: id for token, id in sorted(vocabulary.items())[::3] if id not in special}
    path = tmp_path / "some.txt"
    path.write_text(
        "".join(f"{token} {source} 0.1\n" for token in allowed for source in translator.tokenizer.get_vocab())
    )
    options = {**SETTINGS, **settings, "shortlist": str(path), "shortlist_first": 0, "shortlist_best": 10**6}
    copies = {id for one in sentences for id in translator.encode_source(one).ids}
    own = set(allowed.values()) | special
    own |= copies if vocabulary == translator.tokenizer.get_vocab() else set()
    for one in translator(sentences, **options):
        assert set(one.hypotheses[0].tokens) <= own
        assert one.score == pytest.approx(translator.score([one.source], [one.hypotheses[0].tokens])[0].score, abs=1e-4)
    prefix = next(pair for pair in ("Der Hund", "Die", "Wir") if not set(translator.encode_target(pair).ids) <= own)
    assert all(one.text.startswith(prefix) for one in translator(sentences, [prefix] * 8, **options))


def test_a_changed_file_is_read_again(translator, every_token, sentences, tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(Path(every_token).read_text())
    translator(sentences[:1], **SETTINGS, shortlist=str(path))
    path.write_text("garbage\n")
    with rejects("not a line"):
        translator(sentences[:1], **SETTINGS, shortlist=str(path))


def test_the_likeliest_translations_of_a_batch(translator):
    shortlist = Shortlist({5: [9, 7], 6: [8]}, always=[0, 2])
    assert shortlist.tokens([Tokens([5, 3]), Tokens([3, 4])]) == [0, 2, 7, 9]
    assert shortlist.tokens([Tokens([6]), Tokens([5])], further=[Tokens(), Tokens([11])]) == [0, 2, 7, 8, 9, 11]
    assert Shortlist({5: [9]}, [0], copies=True).tokens([Tokens([5, 6])]) == [0, 5, 6, 9]


def test_files_of_marian(translator, tmp_path, caplog):
    """Plain or gzipped, in any order, with tokens that the vocabularies lack."""
    (first, source_id), *_ = sorted(translator.tokenizer.get_vocab().items())
    (a, a_id), (b, b_id), (c, _) = sorted(translator.target_tokenizer.get_vocab().items())[-3:]
    text = f"{a} {first} 0.2\nNULL {first} 0.9\n{c} {first} 1e-5\n{b} {first} 0.7\n{a} NULL 0.3\n"
    for name, write in (("lex.s2t", open), ("lex.s2t.gz", gzip.open)):
        with write(tmp_path / name, "wt") as file:
            file.write(text)
        shortlist = Shortlist.read(tmp_path / name, translator.tokenizers, first=2, best=2)
        assert list(shortlist.translations.items()) == [(source_id, [b_id, a_id])]
        assert set(shortlist.always) == {0, 1, *translator.target_tokenizer.all_special_ids}
    assert "2 of 5 lines of" in caplog.text and "made for another model?" in caplog.text


def test_a_list_made_by_the_attention(translator, corpus, tmp_path, monkeypatch):
    pairs = corpus["test"][:20]
    sources, targets = [pair.en for pair in pairs], [pair.de for pair in pairs]
    lines = write_shortlist(tmp_path / "lex.gz", translator, sources, targets)
    if getattr(translator.model.config, "decoder_attention_heads", 1) > 1:
        for head in (0, 1):
            write_shortlist(tmp_path / f"{head}", translator, sources, targets, head=head)
        assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()
    with rejects(field="head"):
        write_shortlist(tmp_path / "99", translator, sources, targets, head=99)
    shortlist = Shortlist.read(tmp_path / "lex.gz", translator.tokenizers, first=0, best=10**6)
    assert sum(map(len, shortlist.translations.values())) == lines > 0
    with gzip.open(tmp_path / "lex.gz", "rt") as file:
        rows = [line.split() for line in file]
    for source in {row[1] for row in rows}:
        shares = [float(row[2]) for row in rows if row[1] == source]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=0.02)
    control = {*translator.tokenizer.all_special_tokens, *translator.target_tokenizer.all_special_tokens}
    assert not control & {token for row in rows for token in row[:2]}
    reached = {id for each in shortlist.translations.values() for id in each}
    used = {id for one in targets for id in translator.encode_target(one).ids} - translator.codec.control_ids[1]
    assert reached <= used - end_ids(translator.model)


def test_mistakes(translator, tiny_folder, every_token, tmp_path, monkeypatch):
    other, wrong = tmp_path / "other", tmp_path / "wrong"
    other.write_text("Abendland occident 0.5\n")
    wrong.write_text("Hund dog\n")
    nan = tmp_path / "nan"
    nan.write_text("Hund dog nan\n")
    for path in (other, wrong, nan):
        with rejects(str(path)):
            translator("The dog sleeps.", shortlist=str(path))
    with pytest.raises(FileNotFoundError):
        translator("The dog sleeps.", shortlist=str(tmp_path / "no"))
    with rejects(field="generate"):
        translator("The dog sleeps.", shortlist=every_token, do_sample=True, beams=1)
    ensemble = recnmt_hf.Translator.from_pretrained([tiny_folder, tiny_folder], device="cpu")
    with rejects(field="shortlist"):
        ensemble("The dog sleeps.", shortlist=every_token)
    monkeypatch.setattr(translator.model, "lm_head", torch.nn.Sequential(translator.model.lm_head))
    with rejects(field="shortlist"):
        translator("The dog sleeps.", shortlist=every_token)
