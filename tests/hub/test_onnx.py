"""Models of every family as graphs of ONNX: the same translations, scores and commands."""

import json
import re

import pytest
import torch
from model_contract import TINY

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.families import FAMILIES
from recnmt_hf.hub import onnx_graphs


pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="this torch unrolls recurrences in exported graphs"
)


# Of the base Transformer: the states of two decoder layers, in the order of the layers, above or below attention.
VARIANTS = {
    "student": {"decoder_autoregression": "ssru", "decoder_layers": 2, "position_embedding_type": "tensor2tensor"},
    "hybrid": {
        "decoder_autoregression": ["self_attention", "gated_delta"],
        "decoder_layers": 2,
        "encoder_mixer": "mlstm",
    },
    "mamba2": {"decoder_autoregression": "mamba2", "encoder_mixer": "mingru"},
    "relative": {
        "decoder_autoregression": ["mlstm", "self_attention"],
        "decoder_layers": 2,
        "encoder_mixer": "gated_delta",
        "self_attention_type": "relative",
    },
}


def saved(folder, tokenizer, family, fields):
    """Save a random model with high confidence in its predictions."""
    torch.manual_seed(7)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "vocab_size": len(tokenizer)}
    model = family.load_class("ForConditionalGeneration")(family.load_class("Config")(**TINY | layers | fields))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory):
    """Folders of a model and of its graphs, made once for each family."""
    made = {}

    def find(name):
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            family = FAMILIES["nmt_transformer" if name in VARIANTS else name]
            folder = saved(place / "model", tokenizer, family, VARIANTS.get(name, family.small))
            assert main(["convert", str(folder), "-o", str(place / "onnx"), "--to", "onnx"]) == 0
            made[name] = (folder, place / "onnx")
        return made[name]

    return find


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_same_translations_and_scores(name, exported, corpus):
    own, graphs = (recnmt_hf.Translator.from_pretrained(folder) for folder in exported(name))
    assert type(graphs.model).__name__ == "OnnxModel" and graphs.model.dtype == torch.float32
    pairs = corpus["test"][:9]
    sources, targets = [pair.en for pair in pairs], [pair.de for pair in pairs]
    for one, other in zip(own.score(sources, targets), graphs.score(sources, targets), strict=True):
        found = torch.tensor([one.token_log_probs, other.token_log_probs])
        torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    prefixes = ["", "Der"] + [""] * 7
    for settings in (
        {"beams": 1},
        {"beams": 3, "num_hypotheses": 3},
        {"beams": 3, "no_repeat_ngram_size": 2},
        {"beams": 3, "prefixes": prefixes},
        {"beams": 1, "do_sample": True, "num_hypotheses": 2, "seed": 3},
    ):
        expected, found = (each(sources, max_length_extra=8, **settings) for each in (own, graphs))
        for one, other in zip(expected, found, strict=True):
            assert [each.tokens for each in one.hypotheses] == [each.tokens for each in other.hypotheses], settings


@pytest.mark.slow
def test_plain_generate_and_an_ensemble(exported, corpus):
    """The graphs' model under transformers' own search, and beside another family."""
    own, graphs = (recnmt_hf.Translator.from_pretrained(folder) for folder in exported("rpe_transformer"))
    inputs = own.backend.source_inputs([own.encode_source(pair.en) for pair in corpus["test"][:4]])
    for settings in ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}):
        expected, found = (each.model.generate(**inputs, max_new_tokens=9, **settings) for each in (own, graphs))
        assert expected.equal(found), settings
    mask = inputs["attention_mask"]
    expected = graphs.model.generate(**inputs, max_new_tokens=4)
    for changed in ({"attention_mask": mask.bool()}, {"attention_mask": mask.float()}):
        assert expected.equal(graphs.model.generate(**{**inputs, **changed}, max_new_tokens=4)), changed
    plain, recurrent = exported("gret")[0], exported("rpe_transformer")
    sentences = [pair.en for pair in corpus["test"][:4]]
    expected, found = (recnmt_hf.Translator.from_pretrained([plain, each])(sentences, beams=2) for each in recurrent)
    assert [one.hypotheses[0].tokens for one in expected] == [one.hypotheses[0].tokens for one in found]


@pytest.mark.slow
def test_the_folder_and_the_command(exported, corpus, tmp_path):
    model, graphs = exported("gret")
    names = {path.name for path in graphs.iterdir()}
    assert names >= {"encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx", "weights.onnx_data"}
    assert json.loads((graphs / "recnmt_engine.json").read_text())["format"] == "onnx"
    weights = sum(tensor.numel() * 4 for tensor in recnmt_hf.Translator.from_pretrained(model).model.parameters())
    assert (graphs / "weights.onnx_data").stat().st_size < 2 * weights  # all graphs share them
    here = str(__file__).encode().partition(b"tests")[0]
    assert not any(here in path.read_bytes() for path in graphs.glob("*.onnx"))
    (tmp_path / "a.en").write_text("\n".join(pair.en for pair in corpus["test"][:4]) + "\n\n")
    outputs = []
    for name, folder in (("model", model), ("graphs", graphs)):
        words = ["translate", str(folder), "-i", str(tmp_path / "a.en"), "-o", str(tmp_path / name)]
        assert main([*words, "--format", "n-best", "--n-best", "2", "--beams", "2", "--max-length-extra", "4"]) == 0
        outputs.append([line.split(" ||| ")[:2] for line in (tmp_path / name).read_text().splitlines()])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["student", "rnmt"])
def test_graphs_quantized_by_onnx_runtime(name, exported, corpus, repository, tmp_path, monkeypatch):
    """As the documentation does it: the graphs are smaller, with scores near those of the model."""
    import onnx

    folder, graphs = exported(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/onnx").symlink_to(graphs)
    (code,) = re.findall("```py\n(.*?)```", (repository / "src/recnmt_hf/inference/README.md").read_text(), re.DOTALL)
    exec(code, {})
    step = onnx.load("outputs/onnx_int8/decoder_with_past_model.onnx")
    assert "MatMulInteger" in {node.op_type for node in step.graph.node}
    own, other = (recnmt_hf.Translator.from_pretrained(path) for path in (folder, "outputs/onnx_int8"))
    pairs = corpus["test"][:9]
    sources, targets = [pair.en for pair in pairs], [pair.de for pair in pairs]
    scores = [torch.tensor([score.log_prob for score in each.score(sources, targets)]) for each in (own, other)]
    torch.testing.assert_close(*scores, rtol=0.1, atol=0.5)


@pytest.mark.slow
def test_what_the_graphs_cannot_do(exported, tokenizer, tmp_path, capsys):
    model, graphs = exported("gret")
    translator = recnmt_hf.Translator.from_pretrained(graphs)
    with pytest.raises(recnmt_hf.UserError, match=str(graphs)):
        translator("The dog sleeps.", alignments=True)
    with pytest.raises(recnmt_hf.UserError, match=str(graphs)):
        recnmt_hf.Translator.from_pretrained(graphs, quantization="int8")
    words = ["convert", str(model), "-o", str(tmp_path / "out"), "--to", "onnx"]
    assert main([*words, "--quantization", "int8"]) == 2 and "--quantization" in capsys.readouterr().err
    (graphs / "encoder_model.onnx").write_bytes(b"no graph")
    with pytest.raises(Exception, match=r"encoder_model\.onnx"):
        recnmt_hf.Translator.from_pretrained(graphs)
    (graphs / "recnmt_engine.json").write_text("{}")
    with pytest.raises(recnmt_hf.UserError, match=r"recnmt_engine\.json"):
        recnmt_hf.Translator.from_pretrained(graphs)


@pytest.mark.slow
def test_wrong_graphs_are_not_written(tokenizer, tmp_path, capsys, monkeypatch):
    """The graphs, here of another model, are compared with the model before anything is written."""
    graphs_of = onnx_graphs.graphs_of
    monkeypatch.setattr(onnx_graphs, "graphs_of", lambda model: graphs_of(type(model)(model.config).eval()))
    folder = saved(tmp_path / "model", tokenizer, FAMILIES["nmt_transformer"], {})
    assert main(["convert", str(folder), "-o", str(tmp_path / "out"), "--to", "onnx"]) == 2
    assert "The graphs' logits differ from" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_models_that_draw_samples_are_rejected(tokenizer, tmp_path, capsys):
    saved(tmp_path / "model", tokenizer, FAMILIES["vrnmt"], {"latent_inference": "sample"})
    assert main(["convert", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--to", "onnx"]) == 2
    assert "latent_inference='sample'. Use" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_graphs_read_trees(exported):
    """Trees of sentences that were not used for the export; without trees there are no edges."""
    folder, graphs = exported("gcn_rnmt")
    own = recnmt_hf.GCNRNMTForConditionalGeneration.from_pretrained(folder).eval()
    model = recnmt_hf.Translator.from_pretrained(graphs).model
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(4, 60, (3, 8), generator=generator)
    mask = (torch.arange(8)[None] < torch.tensor([8, 5, 2])[:, None]).long()
    trees = {
        "dependency_heads": torch.randint(-1, 9, (3, 8), generator=generator),
        "dependency_relations": torch.randint(0, own.config.num_relations, (3, 8), generator=generator),
    }
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": source[:, :3]}
    expected = own(**inputs, **trees).logits
    torch.testing.assert_close(model(**inputs, **trees).logits, expected, atol=1e-4, rtol=1e-4)
    assert (own(**inputs).logits - expected).abs().max() > 0.01
    torch.testing.assert_close(model(**inputs).logits, own(**inputs).logits, atol=1e-4, rtol=1e-4)
    del inputs["decoder_input_ids"]
    for beams in (1, 3):
        options = {"num_beams": beams, "max_new_tokens": 6, "min_new_tokens": 6}
        assert model.generate(**inputs, **trees, **options).equal(own.generate(**inputs, **trees, **options))
