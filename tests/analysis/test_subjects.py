"""`recnmt inspect`: its table of families, and what each family shows of a sentence, as values, tables and pictures."""

import inspect

import numpy as np
import pytest
import torch
from transformers import MarianConfig
from user_errors import rejects

import recnmt_hf
from recnmt_hf import Translator
from recnmt_hf.analysis.forgetting import forgetting
from recnmt_hf.analysis.global_state import global_state, inspect_global_state
from recnmt_hf.analysis.plots import heat_maps
from recnmt_hf.analysis.recurrence import inspect_attention, recurrence_attention
from recnmt_hf.analysis.recurrent_positions import SidePositions, recurrent_positions
from recnmt_hf.analysis.relations import relation_scores
from recnmt_hf.analysis.subjects import SUBJECTS, find_subject, load_function
from recnmt_hf.analysis.syntactic_distance import SyntacticDistances, nodes, syntactic_distances
from recnmt_hf.commands.main import main


SENTENCE, TRANSLATION = "The dog sleeps.", "Der Hund schläft."
# Function and fields of each family, fields without the mechanism, and what the error says of such a model.
FAMILIES = {
    "BiARNTransformer": (recurrence_attention, {"recurrence_encoder_layers": 2, "recurrence_steps": 5}, {}, "Use a"),
    "GRET": (
        global_state,
        {"num_capsules": 5},
        {"global_capsule": False, "global_gate": False},
        "Use a gret with use_global_state=true",
    ),
    "NMTTransformer": (
        forgetting,
        {"decoder_autoregression": ["gated_delta", "mingru"], "encoder_mixer": ["mlstm", "mamba2"]},
        {"decoder_autoregression": "self_attention", "encoder_mixer": "self_attention"},
        "Use encoder_mixer",
    ),
    "ONLSTMTransformer": (syntactic_distances, {}, {"encoder_layer_types": ["lstm", "attention"]}, 'Use one with "onl'),
    "RNMT": (relation_scores, {"init_uniform": None}, {"relation_layers": 0}, "model has no relation layers"),
    "RPETransformer": (
        recurrent_positions,
        {},
        {"rpe_encoder": False, "rpe_decoder": False},
        "Use an rpe_transformer with rpe_encoder",
    ),
}


@pytest.fixture(scope="module")
def save(tokenizer, tmp_path_factory):
    """Return a function that saves an untrained model of a family."""

    def saved(prefix, **fields):
        torch.manual_seed(2)
        sizes = {"vocab_size": len(tokenizer), "d_model": 32, **FAMILIES[prefix][1]}
        config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", **{**sizes, **fields})
        folder = tmp_path_factory.mktemp(prefix)
        getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return saved


@pytest.fixture(scope="module")
def folders(save):
    return {prefix: save(prefix) for prefix in FAMILIES}


@pytest.fixture(scope="module")
def translators(folders):
    return {prefix: Translator.from_pretrained(folder, device="cpu") for prefix, folder in folders.items()}


@pytest.fixture
def shown(capsys):
    """Return a function that runs the command, and returns the cells of what it prints."""

    def run(folder, *words):
        assert main(["inspect", folder, SENTENCE, "--device", "cpu", *words]) == 0
        return [line.split("\t") for line in capsys.readouterr().out.splitlines()]

    return run


def ids_of(translator):
    return translator.tokenizer(SENTENCE, return_tensors="pt")["input_ids"]


def labels_of(translator):
    return translator.tokenizer(text_target=TRANSLATION, return_tensors="pt")["input_ids"]


def close(found, expected):
    np.testing.assert_allclose(found, expected.detach(), atol=1e-6)


def test_every_function_takes_the_options_of_its_row():
    for family, subject in SUBJECTS.items():
        assert family in recnmt_hf.MODEL_TYPES
        names = tuple(inspect.signature(load_function(subject)).parameters)
        assert names == ("translator", "sentence", "output", *subject.options)
        assert set(subject.options) <= {"target", "layer", "head", "direction"}


def test_a_derived_family_has_the_subject_of_its_base():
    class Derived(recnmt_hf.GRETConfig):
        model_type = "derived_gret"

    config = Derived.from_preset("tiny", vocab_size=20)
    assert find_subject(config) is SUBJECTS["gret"] and find_subject(config, "tree").name == "tree"
    with rejects("Use a model of one of these families"):
        find_subject(MarianConfig())


def test_global_state(translators):
    translator = translators["GRET"]
    state = global_state(translator, SENTENCE, TRANSLATION)
    outputs = translator.model(input_ids=ids_of(translator), labels=labels_of(translator), output_attentions=True)
    for layer in range(2):
        close(state.routing[layer], outputs.routing_weights[layer][0])
        close(state.pooling[layer], outputs.pooling_weights[layer][0])
    close(state.gates, outputs.global_gates[0][0].mean(-1))
    assert "".join(state.source).startswith("Thedogsleeps.") and "".join(state.target).startswith("DerHundschläft.")
    assert len(global_state(translator, SENTENCE).target) >= 1


def test_recurrent_positions(translators):
    translator = translators["RPETransformer"]
    source, target = recurrent_positions(translator, SENTENCE, TRANSLATION)
    labels = labels_of(translator)
    outputs = translator.model(input_ids=ids_of(translator), labels=labels, output_attentions=True)
    for side, vectors in ((source, outputs.source_recurrent_positions), (target, outputs.target_recurrent_positions)):
        rows = vectors[0][0].detach().numpy()
        lengths = np.linalg.norm(rows, axis=1)
        np.testing.assert_allclose(side.recurrent, rows @ rows.T / np.outer(lengths, lengths), atol=1e-5)
        np.testing.assert_allclose(np.diagonal(side.absolute), 1, atol=1e-6)
        # Sinusoids know distances alone: every diagonal is one value.
        for distance in range(1, len(side.tokens)):
            assert np.ptp(np.diagonal(side.absolute, distance)) < 1e-6
    assert "".join(source.tokens).startswith("Thedogsleeps.")
    assert "".join(target.tokens[1:]).startswith("DerHundschläft") and len(target.tokens) == labels.shape[1]
    assert len(recurrent_positions(translator, SENTENCE)) == 2


def test_forgetting(save):
    translator = Translator.from_pretrained(save("NMTTransformer"), device="cpu")
    _, mingru = translator.model.model.decoder.layers
    with torch.no_grad():
        mingru.self_attn.bias.fill_(-100.0)  # of its gate: nothing is written
    layers = forgetting(translator, SENTENCE, TRANSLATION)
    sides = [f"encoder {layer}{direction}" for layer in (0, 1) for direction in ("", ", backward")]
    assert [layer.name for layer in layers] == [*sides, "decoder 0", "decoder 1"]
    assert "".join(layers[1].tokens).startswith("Thedogsleeps.") and layers[4].tokens[0] == "<start>"
    for layer in layers:
        assert layer.kept.shape == layer.written.shape and layer.kept.shape[1] == len(layer.tokens)
        assert (layer.kept >= 0).all() and (layer.kept <= 1).all() and (layer.half_life > 0).all()
    assert layers[-1].written.max() == 0 and layers[-1].kept.min() == 1 and layers[-1].half_life.min() > 1e6


def test_syntactic_distances(translators):
    translator = translators["ONLSTMTransformer"]
    state = syntactic_distances(translator, SENTENCE)
    outputs = translator.model.get_encoder()(ids_of(translator), output_attentions=True)
    close(state.distances[0], outputs.master_gate_distances[0][0])
    assert "".join(state.tokens).startswith("Thedogsleeps.") and state.distances.shape == (1, len(state.tokens), 2)


def test_recurrence_attention(translators):
    translator = translators["BiARNTransformer"]
    ids = ids_of(translator)
    expected = translator.model.get_encoder()(ids, output_attentions=True).recurrence_attentions
    found = recurrence_attention(translator, SENTENCE)
    assert len(found.tokens) == ids.shape[1]
    assert "".join(found.tokens).startswith("Thedogsleeps.")
    close(found.weights, expected[0][0])
    assert f"{found.weights[0, 2, 0, 0]:.6f}" in inspect_attention(translator, SENTENCE, head=2)
    above = recurrence_attention(translator, SENTENCE, layer=1)
    assert above.tokens == [f"step {t}" for t in range(1, 6)] and above.weights.shape == (2, 4, 5, 5)


def test_relation_scores(translators):
    translator = translators["RNMT"]
    expected = translator.model.get_encoder()(ids_of(translator), output_attentions=True).relation_scores
    for layer in (0, 1):
        tokens, scores = relation_scores(translator, SENTENCE, layer)
        close(scores, expected[layer][0])
        assert scores.shape == (len(tokens),) * 2 and scores.std() > 0


def test_a_sentence_is_split_where_the_memory_is_closed_most():
    """Before the token that closes it, or behind it where the sentence is read from its end."""
    forward, backward = [0.9, 0.2, 0.5, 0.1], [0.1, 0.6, 0.2, 0.9]
    state = SyntacticDistances(list("abcd"), np.array([[[0.0, 0.0]] * 4, list(zip(forward, backward, strict=True))]))
    assert state.tree() == ((0, 1), (2, 3)) and state.brackets() == "((a b) (c d))"
    assert state.brackets(direction="backward") == "((a b) (c d))"
    assert state.brackets(0) == "(a (b (c d)))"  # ties: the first
    assert SyntacticDistances(["a"], np.zeros((1, 1, 1))).brackets() == "a"
    assert SyntacticDistances(["a"] * 500, np.zeros((1, 500, 1))).brackets().count("(") == 499
    steep = SyntacticDistances(list("abcd"), np.array([[[0.0], [0.1], [0.2], [0.3]]]))
    assert steep.brackets() == "(((a b) c) d)"
    assert list(nodes(steep.tree())) == [
        (0.5, 1, [0.0, 0, 1.0, 0]),
        (1.25, 2, [0.5, 1, 2.0, 0]),
        (2.125, 3, [1.25, 2, 3.0, 0]),
    ]


def test_similarities_by_distance():
    recurrent = np.array([[1.0, 0.5, -0.25], [0.5, 1.0, 0.1], [-0.25, 0.1, 1.0]])
    absolute = np.array([[1.0, 0.9, 0.8], [0.9, 1.0, 0.9], [0.8, 0.9, 1.0]])
    rows = SidePositions("source", list("abc"), recurrent, absolute).by_distance()
    assert rows == pytest.approx(np.array([[1, 0.9, 0.3, 0.1, 0.5], [2, 0.8, -0.25, -0.25, -0.25]]))
    assert SidePositions("target", ["a"], recurrent, None).by_distance() == []
    assert SidePositions("target", list("ab"), recurrent[:2, :2], None).by_distance() == [(1, None, 0.5, 0.5, 0.5)]


def test_tables(folders, shown):
    first, *rows = shown(folders["GRET"], "--target", TRANSLATION)
    capsules, heading, words = rows[:5], rows[5], rows[6:]
    assert first[:4] == ["capsule", "weight", "The", "dog"] and heading == ["target", "gate"]
    assert all(abs(sum(map(float, row[2:])) - 1) < 1e-4 for row in capsules)
    assert abs(sum(float(row[1]) for row in capsules) - 1) < 1e-4
    assert words[0][0].startswith("D") and all(0 < float(row[1]) < 1 for row in words)
    assert shown(folders["GRET"], "--target", TRANSLATION, "--layer", "0")[1] != capsules[0]

    first, *rows = shown(folders["BiARNTransformer"])
    assert first[:4] == ["direction", "step", "The", "dog"] and len(rows) == 2 * 5
    assert {row[0] for row in rows} == {"forward", "backward"}
    assert all(abs(sum(map(float, row[2:])) - 1) < 1e-4 for row in rows)

    (brackets,), heading, *rows = shown(folders["ONLSTMTransformer"])
    assert brackets.count("(") == len(rows) - 1 and heading == ["token", "distance"]
    assert brackets.replace("(", "").replace(")", "").split() == [row[0] for row in rows]
    assert all(0 < float(row[1]) < 1 for row in rows)

    first, *rows = shown(folders["RNMT"], "--layer", "1")
    assert first[1:] == [row[0] for row in rows] and float(rows[0][1]) > 0


@pytest.mark.parametrize(
    ("fields", "sides"),
    [
        ({}, ["source", "target"]),
        ({"rpe_encoder": False}, ["target"]),
        ({"rpe_dim": 32, "rpe_decoder": False}, ["source"]),
    ],
    ids=str,
)
def test_a_table_of_the_sides_that_have_a_recurrence(save, shown, fields, sides):
    rows = shown(save("RPETransformer", **fields), "--target", TRANSLATION)[1:]
    assert {row[0] for row in rows} == set(sides)
    assert all(bool(row[3]) == (fields.get("rpe_dim") != 32) for row in rows), "with positions or without"


@pytest.mark.parametrize(
    ("prefix", "fields", "words", "summary"),
    [
        ("BiARNTransformer", {}, ["--head", "1"], "forward and backward, 5 steps over"),
        ("GRET", {}, ["--target", TRANSLATION], "5 capsules over"),
        ("GRET", {"global_capsule": False}, [], "0 capsules over"),
        ("GRET", {"global_gate": False, "capsule_pooling": "mean"}, [], "5 capsules over"),
        ("ONLSTMTransformer", {}, ["--direction", "backward", "--layer", "0"], "a tree over"),
        ("RNMT", {}, [], "relations of"),
        ("RPETransformer", {}, ["--target", TRANSLATION], "target"),
        ("RPETransformer", {"rpe_dim": 32, "rpe_decoder": False}, [], "source"),
    ],
)
def test_pictures(save, shown, tmp_path, prefix, fields, words, summary):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    folder = save(prefix, **fields)
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        picture = tmp_path / f"picture.{ending}"
        assert summary in str(shown(folder, "-o", str(picture), *words))
        assert picture.read_bytes().startswith(start) and picture.stat().st_size > 5_000
    if prefix == "RNMT":
        assert "length of the relation vector" in picture.read_text() and "attention" not in picture.read_text()


def test_dollars_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    heat_maps([("from $5 to $x_{$", np.ones((1, 1)))], ["$5 of $\\b"], ["$"], "step", tmp_path / "a.png")
    assert (tmp_path / "a.png").is_file()


@pytest.mark.parametrize("prefix", FAMILIES)
def test_blank_sentences_and_other_models(translators, save, tiny_folder, prefix):
    function, _, without, message = FAMILIES[prefix]
    for blank in (" ", "\ufeff \u00ad", "\x07"):
        with rejects(field="sentence"):
            function(translators[prefix], blank)
    if "target" in inspect.signature(function).parameters:
        with rejects(field="translation"):
            function(translators[prefix], SENTENCE, "")
    for folder in (tiny_folder, *([save(prefix, **without)] if without else [])):
        with rejects(message):
            function(Translator.from_pretrained(folder, device="cpu"), SENTENCE)


@pytest.mark.parametrize("wrong", [4, "1", 1.5, True])
def test_layers_heads_and_directions_that_do_not_exist(translators, wrong):
    with rejects(field="head"):
        inspect_attention(translators["BiARNTransformer"], SENTENCE, head=wrong)
    distances = syntactic_distances(translators["ONLSTMTransformer"], SENTENCE)
    for choose in (
        lambda: recurrence_attention(translators["BiARNTransformer"], SENTENCE, layer=wrong),
        lambda: inspect_global_state(translators["GRET"], SENTENCE, layer=wrong),
        lambda: distances.of(wrong),
        lambda: relation_scores(translators["RNMT"], SENTENCE, wrong),
    ):
        with rejects(field="layer"):
            choose()
    with rejects("forward", "backward", field="direction"):
        distances.of(direction="up")


def test_options_that_do_not_fit(folders, save, capsys):
    for folder, words, message in (
        (folders["GRET"], ["-o", "picture.txt"], "is not the name of an image file"),
        (save("ONLSTMTransformer", rnn_bidirectional=False), ["--direction", "backward"], "direction="),
    ):
        assert main(["inspect", folder, SENTENCE, "--device", "cpu", *words]) == 2
        assert message in capsys.readouterr().err
    with rejects(field="large.png"):
        heat_maps([("", np.ones((160, 160)))], ["a"] * 160, ["b"] * 160, "step", "large.png")
