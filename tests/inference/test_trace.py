"""The trace of a translation shows what the model read and wrote, so that faults of the input are found."""

import copy
import json

import pytest

from recnmt_hf import Translator
from recnmt_hf.commands.main import main
from recnmt_hf.data.tokenization import add_tags


OPTIONS = {"beams": 2, "num_hypotheses": 2, "max_new_tokens": 4}
TEXT = "The DOG sleeps."


@pytest.fixture(scope="module")
def model(tiny_folder):
    return Translator.from_pretrained(tiny_folder, device="cpu").model


def traced(translator, *texts, **options):
    records = []
    return list(translator.translate(texts, trace=records.append, **OPTIONS | options)), records


def test_a_trace_has_what_was_read_and_written(model, tokenizer):
    translator = Translator(model, tokenizer)
    found, records = traced(translator, TEXT, " ", f"{TEXT} We sleep.")
    assert [record["sentence"] for record in records] == [1, 2, 3]
    assert [len(record["pieces"]) for record in records] == [1, 0, 2]
    assert [record["translation"] for record in records] == [translation.text for translation in found]
    (piece,) = records[0]["pieces"]
    assert piece["source"]["ids"] == translator.encode_source(TEXT).ids and piece["source"]["unknown"] == 0
    assert piece["source"]["tokens"] == tokenizer.convert_ids_to_tokens(piece["source"]["ids"])
    assert piece["decoder_start"]["ids"] == [model.config.decoder_start_token_id]
    for row, hypothesis in zip(piece["rows"], found[0].hypotheses, strict=True):
        assert (row["ids"], row["score"], row["log_prob"]) == (hypothesis.tokens, hypothesis.score, hypothesis.log_prob)
    assert json.loads(json.dumps(records)) == records
    _, (foreign,) = traced(translator, "Ж")
    assert foreign["pieces"][0]["source"]["unknown"] > 0


def test_a_wrong_tag_and_a_prefix_are_found(model, tokenizer):
    own, tags = copy.deepcopy(tokenizer), [">>de<<", ">>fr<<"]
    add_tags(own, tags)
    model.resize_token_embeddings(len(own))
    translator = Translator(model, own, check=False)
    _, (right, wrong) = traced(translator, f">>de<< {TEXT}", f">>fr<< {TEXT}")
    assert [record["tags"] for record in (right, wrong)] == [[tag] for tag in tags]
    assert [record["pieces"][0]["source"]["tokens"][0] for record in (right, wrong)] == tags
    assert (right["target_lang"], wrong["target_lang"]) == ("de", "fr")
    records = []
    list(translator.translate([f">>de<< {TEXT}"], prefixes=["Der"], trace=records.append, **OPTIONS))
    assert "".join(records[0]["pieces"][0]["decoder_start"]["tokens"][1:]).strip("\u2581 ") == "Der"


def test_truncation_is_found(model, tokenizer):
    translator = Translator(model, tokenizer, check=False)
    length = len(translator.encode_source(TEXT))
    _, (cut,) = traced(translator, TEXT, on_long="truncate", max_source_length=3)
    assert cut["truncated"] == length - 3 and len(cut["pieces"][0]["source"]["ids"]) == 3


def test_the_command_writes_a_trace(tiny_folder, tmp_path, capsys):
    (tmp_path / "in").write_text(f"{TEXT}\n\nWe sleep.\n")
    words = ["translate", str(tiny_folder), "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*words, "--beams", "1", "--trace", str(tmp_path / "trace")]) == 0
    records = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [record["source"] for record in records] == [TEXT, "", "We sleep."]
    assert [record["translation"] for record in records] == (tmp_path / "out").read_text().splitlines()
    assert main([*words, "--trace", str(tmp_path / "in")]) == 2, "an input is not overwritten"
    assert (tmp_path / "in").read_text().startswith(TEXT)
