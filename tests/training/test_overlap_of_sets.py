"""What a run says of its test sets besides the score: sentences seen in training, length, suspicious output."""

from recnmt_hf.training.evidence import Evidence
from recnmt_hf.training.finishing import seen_in_training
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


def test_sentences_of_the_training_text_are_counted(tmp_path, corpus, caplog):
    """Two of the four test sentences, apart from case and punctuation; the card states the score without them."""
    pairs = corpus["train"][:40]
    test = [(pairs[0].en.upper(), pairs[0].de), (f"{pairs[1].en} !", pairs[1].de)]
    test += [(pair.en, pair.de) for pair in corpus["test_deep"][:2]]
    files = {"train": [(pair.en, pair.de) for pair in pairs], "test": test}
    for name, rows in files.items():
        for side, lines in zip(("en", "de"), zip(*rows, strict=True), strict=True):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines))
    sets = {name: {"source": str(tmp_path / f"{name}.en"), "target": str(tmp_path / f"{name}.de")} for name in files}
    recipe = Recipe(
        model={"preset": "tiny", "fields": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}},
        data={"train": [sets["train"]], "validation": [sets["test"]]},
        tokenizer={"kind": "word"},
        training={"max_steps": 2, "max_tokens": 256, "eval_steps": 2, "save_steps": 2, "use_cpu": True},
        average={"count": 1},
        test={"unseen": sets["test"]},
    )
    folder = train(recipe, tmp_path / "run")
    said = caplog.text
    assert "test.unseen is the validation set" in said and "2 sentences are in the training text" in said
    evidence = Evidence.load(folder)
    (score,) = evidence.tests
    assert score.seen == 2 and set(score.clean_scores) == {"bleu"} and score.length_ratio is not None
    assert any("eval_length_ratio" in row for row in evidence.curve)


def test_case_punctuation_and_spaces_do_not_count():
    training = ["The dog sleeps.", "Ein Hund!", "", "we see  the cat"]
    sentences = ["the dog sleeps", "A dog.", "The dog -- sleeps!", "We see the cat.", "..."]
    assert seen_in_training(training, sentences) == {"the dog sleeps", "we see the cat"}
