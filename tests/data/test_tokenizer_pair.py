"""Source and target tokenizer as one thing: saved and loaded."""

import json

import pytest

import recnmt_hf
from recnmt_hf.data import Relations, TokenizerPair


RELATIONS = Relations(("<unk>", "root", "<piece>"))


@pytest.fixture(scope="module")
def separate(corpus):
    source = recnmt_hf.train_tokenizer((pair.en for pair in corpus["train"]), "word", 300)
    return TokenizerPair(source, recnmt_hf.train_tokenizer((pair.de for pair in corpus["train"]), "bpe", 200))


@pytest.mark.parametrize("subfolder", ["", "tokenizer"])
@pytest.mark.parametrize("joint", [True, False])
def test_saved_and_loaded(tokenizer, separate, tmp_path, joint, subfolder):
    pair = TokenizerPair(tokenizer, relations=RELATIONS) if joint else separate
    assert list(pair) == [pair.source, pair.target] and pair.is_joint == joint
    pair.save(tmp_path, source_subfolder=subfolder)
    assert (tmp_path / "target_tokenizer").is_dir() != joint
    found = TokenizerPair.load(tmp_path, source_subfolder=subfolder)
    assert found.is_joint == joint and found.relations == pair.relations
    sentence = "The dog sleeps ."
    for own, original in zip(found, pair, strict=True):
        assert own(sentence)["input_ids"] == original(sentence)["input_ids"]
    # What is loaded is saved as it was: without a word of the machine that it was loaded on.
    found.save(tmp_path / "again", source_subfolder=subfolder)
    for file in tmp_path.glob("**/again/**/tokenizer_config.json"):
        original = tmp_path / file.relative_to(tmp_path / "again")
        assert json.loads(file.read_text()) == json.loads(original.read_text())
