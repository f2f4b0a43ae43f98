"""Dependency trees in translation, scoring and the pipeline: they stay with their sentences, and change results."""

import copy
import itertools

import pytest
import torch
import transformers
from user_errors import rejects

import recnmt_hf
from recnmt_hf.data import ParsedSentence, Relations, TokenizerPair, TreeEncoder
from recnmt_hf.inference import DecodingOptions, Translator
from recnmt_hf.inference.translator import align_pairs


OPTIONS = {"max_length_extra": 4, "max_length_factor": 1}


def parsed(text, seed=0):
    """Return a text with a tree: a chain from the word with number `seed`, with alternating relations."""
    words = str(text).split()
    order = [(i + seed) % len(words) for i in range(len(words))]
    heads = [0] * len(words)
    for dependent, head in itertools.pairwise(order):
        heads[dependent] = head + 1
    return ParsedSentence(words, heads, [("det", "nsubj")[i % 2] for i in range(len(words))])


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A saved random model with large parameters, so that trees change its translations."""
    folder = tmp_path_factory.mktemp("trees") / "model"
    relations = Relations(("<unk>", "det", "nsubj", "<piece>"))
    fields = {"vocab_size": len(tokenizer), "num_relations": len(relations), "d_model": 16}
    model = recnmt_hf.GCNRNMTForConditionalGeneration(recnmt_hf.GCNRNMTConfig.from_preset("tiny", **fields))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        model.lm_head.weight[2] *= 2
    model.save_pretrained(folder)
    TokenizerPair(tokenizer, relations=relations).save(folder)
    return folder


@pytest.fixture(scope="module")
def translator(folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    translator.model.double()
    return translator


@pytest.fixture(scope="module")
def sentences(corpus):
    return [parsed(pair.en, number) for number, pair in enumerate(corpus["test"][:10])]


def texts(translations):
    return [translation.text for translation in translations]


@pytest.mark.parametrize("beams", [1, 4])
def test_translations_are_those_of_generate(translator, sentences, beams):
    encoder = translator.codec.trees
    assert isinstance(encoder, TreeEncoder)
    for sentence, translation in zip(sentences[:4], translator(sentences[:4], beams=beams, **OPTIONS), strict=True):
        (tokens,) = encoder([sentence])
        inputs = {
            "input_ids": torch.tensor([tokens.ids]),
            "dependency_heads": torch.tensor([tokens.tree.heads]),
            "dependency_relations": torch.tensor([tokens.tree.relations]),
        }
        settings = {"num_beams": beams, "max_length": 1 + len(tokens) + 4, "max_new_tokens": None}
        settings |= {"length_penalty": DecodingOptions(beams=beams).penalty()} if beams > 1 else {}
        with torch.no_grad():
            expected = translator.model.generate(**inputs, do_sample=False, **settings)[0, 1:]
        found = translation.hypotheses[0].tokens
        assert expected.tolist()[: len(found)] == found


@pytest.mark.parametrize("settings", [{"beams": 1}, {"beams": 3}, {"beams": 2, "generate": {"min_new_tokens": 2}}])
def test_trees_stay_with_their_sentences(translator, sentences, settings):
    mixed = [*sentences[:5], "", str(sentences[5]), *sentences[6:]]
    whole = translator(mixed, **settings, **OPTIONS)
    one_by_one = [translator(sentence, **settings, **OPTIONS)[0] for sentence in mixed]
    assert texts(whole) == texts(one_by_one)
    assert [t.score for t in whole] == pytest.approx([t.score for t in one_by_one], abs=1e-9)
    small = translator(mixed, max_tokens=1, buffer=3, **settings, **OPTIONS)
    assert texts(small) == texts(whole)
    # Another tree, or none, gives other scores.
    other = [parsed(sentence, 3 + number) for number, sentence in enumerate(sentences)]
    targets = [translation.text for translation in translator(sentences, beams=1, **OPTIONS)]
    sources = sentences, other, list(map(str, sentences))
    assert len({tuple(round(one.log_prob, 6) for one in translator.score(own, targets)) for own in sources}) == 3


def test_scores_are_those_of_translating(translator, sentences):
    translations = translator(sentences, beams=2, **OPTIONS)
    scores = translator.score(sentences, [t.hypotheses[0].tokens for t in translations], beams=2)
    assert [s.log_prob for s in scores] == pytest.approx([t.hypotheses[0].log_prob for t in translations], abs=1e-9)


def test_sentences_with_trees_are_not_split(translator):
    text = parsed("The dog sleeps . Birds sing .")
    options = DecodingOptions(split_sentences="always")
    assert len(translator.codec.encode(text, options).pieces) == 1
    assert len(translator.codec.encode(str(text), options).pieces) == 2


def test_long_sentences(translator, sentences):
    text = ParsedSentence(["The", "dog", "sees", "the", "small", "bird"], [2, 3, 0, 6, 6, 3], ["det"] * 6)
    (whole,) = translator.codec.trees([text])
    limit = len(whole) - 2
    options = DecodingOptions(max_source_length=limit, on_long="truncate")
    (piece,) = translator.codec.encode(text, options).pieces
    assert len(piece) == limit == len(piece.tree.heads) and piece.ids[-1] == whole.ids[-1]
    assert max(piece.tree.heads) < limit - 1
    # Parts keep their trees: "small" hangs on "bird" in the second part.
    pieces = translator.codec.encode(text, DecodingOptions(max_source_length=limit, on_long="split")).pieces
    assert len(pieces) == 2 and [id for part in pieces for id in part.ids[:-1]] == whole.ids[:-1]
    first, second = translator.codec.trees([text.part(0, 3), text.part(3, 6)])
    assert pieces == [first, second]
    with rejects("--on-long"):
        translator.codec.encode(text, DecodingOptions(max_source_length=limit, on_long="error"))


def test_the_pipeline_reads_trees(folder, sentences):
    pipe = transformers.pipeline("recnmt-translation", model=str(folder), device="cpu")
    expected = texts(Translator.from_pretrained(folder, device="cpu")(sentences, beams=2, **OPTIONS))
    records = [{"tokens": list(s.words), "heads": list(s.heads), "relations": list(s.relations)} for s in sentences]
    for inputs in (sentences, records, (record for record in records)):
        found = [each[0]["translation_text"] for each in pipe(inputs, beams=2, batch_size=3, **OPTIONS)]
        assert found == expected
    with rejects("tokens"):
        pipe([{"tokens": ["a"], "heads": [0]}])
    with rejects("the heads of word"):
        pipe([{"tokens": ["a"], "heads": [1], "relations": ["x"]}])


def test_alignments_use_trees(translator, sentences, corpus):
    targets = [pair.de for pair in corpus["test"][:3]]
    sources = sentences[:3], list(map(str, sentences[:3]))
    found, plain = (list(align_pairs(translator, own, targets)) for own in sources)
    (alone,) = align_pairs(translator, sentences[1:2], targets[1:2])
    assert found[1].weights == pytest.approx(alone.weights, abs=1e-9) and found[1].links == alone.links
    assert found[1].weights != pytest.approx(plain[1].weights, abs=1e-3)
    assert [one.source for one in found] == [one.source for one in plain]


def test_relations_that_do_not_match(folder, translator, sentences):
    pair = translator.tokenizers
    without = Translator(translator.model, *pair)
    with pytest.raises(AssertionError, match=r"relations\.json"):
        without(sentences[:1], beams=1)
    assert texts(without([str(sentences[0])], beams=1, **OPTIONS))


def test_ensembles(folder, tiny_folder, sentences):
    mixed = Translator.from_pretrained([tiny_folder, folder], device="cpu")
    swapped = Translator.from_pretrained([folder, tiny_folder], device="cpu")
    assert texts(mixed(sentences, beams=2, **OPTIONS)) == texts(swapped(sentences, beams=2, **OPTIONS))
    plain = mixed(list(map(str, sentences)), beams=2, **OPTIONS)
    scores = [t.score for t in mixed(sentences, beams=2, **OPTIONS)]
    assert scores != pytest.approx([t.score for t in plain], abs=1e-6)
    other = copy.copy(swapped.backend.members[0])
    other.tokenizers = TokenizerPair(other.tokenizers.source, relations=Relations(("<unk>", "obj", "<piece>")))
    with rejects("relations"):
        type(swapped.backend)([*swapped.backend.members, other])
