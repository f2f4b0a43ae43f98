"""Training with dependency trees: columns reach the model, relations are saved, evaluations and test sets use them."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.data import ParsedSentence, Relations, TokenizerPair, load_pairs, train_tokenizer
from recnmt_hf.hub.checked_copy import write_checked_copy
from recnmt_hf.hub.publishing import is_allowed
from recnmt_hf.inference import Translator
from recnmt_hf.models.modeling_gcn_rnmt import GCNRNMTForConditionalGeneration
from recnmt_hf.training.inputs import prepare_trees
from recnmt_hf.training.plan import Plan
from recnmt_hf.training.processes import logger as progress_logger
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


SECTIONS = {
    "model": {"type": "gcn_rnmt", "preset": "tiny", "fields": {"d_model": 16, "gcn_subwords": "all_pieces"}},
    "tokenizer": {"vocab_size": 200},
    "training": {
        "use_cpu": True, "max_steps": 4, "max_tokens": 300, "warmup_steps": 2, "eval_steps": 2, "save_steps": 2,
        "logging_steps": 2, "bleu_samples": 4, "disable_tqdm": True, "bleu_beams": 1,
    },
    "decoding": {"beams": 1, "max_length_extra": 3, "max_length_factor": 1},
    "average": {"count": 2},
}  # fmt: skip


def conllu(text):
    """Return a tree in which each word hangs on the next one."""
    words = list(enumerate(text.split(), start=1))
    rows = [[str(i), word, *"____", str(i + 1 if i < len(words) else 0), f"r{i % 3}:s", "_", "_"] for i, word in words]
    return "".join("\t".join(row) + "\n" for row in rows) + "\n"


@pytest.fixture(scope="module")
def corpora(corpus, tmp_path_factory):
    """Corpora of 60, 8 and 6 pairs with trees: as text files, JSON lines and text files."""
    folder = tmp_path_factory.mktemp("trees")
    made = {}
    for name, split, count in (("train", "train", 60), ("validation", "validation", 8), ("test", "test", 6)):
        pairs = corpus[split][:count]
        for language in ("en", "de"):
            (folder / f"{name}.{language}").write_text("".join(f"{getattr(pair, language)}\n" for pair in pairs))
        (folder / f"{name}.conllu").write_text("".join(conllu(pair.en) for pair in pairs))
        made[name] = {"source": f"{folder}/{name}.en", "target": f"{folder}/{name}.de"}
        made[name]["source_trees"] = f"{folder}/{name}.conllu"
    with (folder / "validation.jsonl").open("w") as file:
        for pair in corpus["validation"][:8]:
            words = pair.en.split()
            record = {"source_tokens": words, "source_heads": [0] * len(words), "de": pair.de}
            file.write(json.dumps({**record, "source_relations": ["r0"] * len(words)}) + "\n")
    made["validation"] = {"jsonl": f"{folder}/validation.jsonl", "tree_columns": True}
    return made


def recipe_of(corpora, **sections):
    data = {"train": [corpora["train"]], "validation": [corpora["validation"]]}
    return Recipe(**{**SECTIONS, "data": data, "test": {"t": corpora["test"]}, **sections})


@pytest.fixture(scope="module")
def run(corpora, tmp_path_factory):
    """A finished run, and the inputs of its model."""
    folder, calls = tmp_path_factory.mktemp("run"), []
    forward = GCNRNMTForConditionalGeneration.forward

    def recorded(self, *args, **kwargs):
        calls.append((self.training, kwargs))
        return forward(self, *args, **kwargs)

    with mock.patch.object(GCNRNMTForConditionalGeneration, "forward", recorded):
        train(recipe_of(corpora), folder)
    return folder, calls


def test_batches_have_trees(run):
    _, calls = run
    batches = [kwargs for _, kwargs in calls if kwargs.get("labels") is not None]
    assert {is_training for is_training, kwargs in calls if kwargs.get("labels") is not None} == {True, False}
    for batch in batches:
        heads, ids = batch["dependency_heads"], batch["input_ids"]
        assert heads.shape == batch["dependency_relations"].shape == ids.shape
        assert (heads < ids.shape[1]).all() and (heads[ids == 0] == -1).all()
    training = [kwargs for is_training, kwargs in calls if is_training]
    # Each word hangs on the next one: heads are to the right, and all pieces of a word have one head.
    heads = training[0]["dependency_heads"]
    places = torch.arange(heads.shape[1]).expand_as(heads)
    assert (heads[heads >= 0] > places[heads >= 0]).all()
    assert set(training[0]["dependency_relations"].unique().tolist()) == {0, 1, 2, 3}


def test_relations_are_saved_copied_and_published_with_the_model(run, tmp_path):
    folder, _ = run
    expected = Relations(("<unk>", "r1", "r2", "r0", "<piece>"))
    for place in ("checkpoint-2", "checkpoint-4", "model"):
        assert Relations.load(folder / place) == expected
        assert json.loads((folder / place / "config.json").read_text())["num_relations"] == 5
    translator = Translator.from_pretrained(folder / "model", device="cpu")
    assert translator.codec.trees.subwords == "all_pieces" and translator.tokenizers.relations == expected
    write_checked_copy(folder / "model", tmp_path / "copy")
    assert Relations.load(tmp_path / "copy") == expected
    assert all(is_allowed(path.relative_to(tmp_path / "copy").as_posix()) for path in (tmp_path / "copy").rglob("*"))


def test_test_sets_and_commands_use_the_trees(run, corpora, tmp_path, capfd):
    folder, _ = run
    files = corpora["test"]
    options = ["--beams", "1", "--max-length-factor", "1", "--max-length-extra", "3", "--split-sentences", "never"]
    trees = ["--source-trees", files["source_trees"]]
    for name, extra in (("with", trees), ("without", [])):
        command = ["translate", f"{folder}/model", "-i", files["source"], "-o", f"{tmp_path}/{name}", *options]
        assert main([*command, "--format", "jsonl", *extra]) in (0, None)
    records = {name: [json.loads(line) for line in (tmp_path / name).open()] for name in ("with", "without")}
    assert [row["text"] for row in records["with"]] == (folder / "model-t.de").read_text().splitlines()
    assert [row["log_prob"] for row in records["with"]] != [row["log_prob"] for row in records["without"]]
    capfd.readouterr()
    scores = []
    for extra in (trees, []):
        assert main(["score", f"{folder}/model", "-s", files["source"], "-t", files["target"], *extra]) in (0, None)
        scores.append(capfd.readouterr().out.splitlines())
    assert len(scores[0]) == 6 and scores[0] != scores[1]
    translator = Translator.from_pretrained(folder / "model", device="cpu")
    pairs = list(load_pairs(files, "en", "de"))
    assert all(isinstance(source, ParsedSentence) for source, _ in pairs)
    expected = [f"{score.log_prob:.6f}" for score in translator.score(*zip(*pairs, strict=True))]
    assert [line.split("\t")[0] for line in scores[0]] == expected
    test = ["test", f"{folder}/model", "--set", "again", files["source"], files["target"], *options[:-2]]
    assert main([*test, "--source-trees", "again", files["source_trees"]]) in (0, None)
    translations = folder / "model/translations"
    assert (translations / "again.de").read_text() == (translations / "t.de").read_text()
    evidence = json.loads((folder / "model/evidence.json").read_text())
    assert evidence["tests"][-1]["dataset"][0]["source_trees"] == "test.conllu"


def test_a_resumed_run_is_the_same(run, corpora, tmp_path):
    folder, _ = run
    half = recipe_of(corpora, training={**SECTIONS["training"], "max_steps": 2}, average={"count": 1}, test={})
    train(half, tmp_path / "run")
    (tmp_path / "run" / "model" / "relations.json").unlink()
    train(recipe_of(corpora), tmp_path / "run", resume=True)
    for name in ("model.safetensors", "relations.json"):
        assert (tmp_path / "run/model" / name).read_bytes() == (folder / "model" / name).read_bytes()


def test_prepared_data_have_trees(run, corpora, tmp_path):
    """The same training as from memory; a warm start has the relations of its baseline."""
    recipe = recipe_of(corpora, test={})
    recipe.save(tmp_path / "recipe.yaml")
    for _ in range(2):  # the second time there is nothing left to do
        assert main(["prepare", f"{tmp_path}/recipe.yaml", "-o", f"{tmp_path}/data", "--workers", "1"]) in (0, None)
    recipe.data.prepared = f"{tmp_path}/data"
    train(recipe, tmp_path / "run")
    for name in ("model.safetensors", "relations.json"):
        assert (tmp_path / "run/model" / name).read_bytes() == (run[0] / "model" / name).read_bytes()
    warm = {**SECTIONS["model"], "init_from": f"{tmp_path}/run/model"}
    train(recipe_of(corpora, model=warm, test={}), tmp_path / "warm")
    train(recipe_of(corpora, model=warm, test={}), tmp_path / "warm", overwrite=True)
    assert Relations.load(tmp_path / "warm/model") == Relations.load(tmp_path / "run/model")
    recipe.model.fields["gcn_subwords"] = "first_piece"
    with rejects(field="data.prepared") as error:
        train(recipe, tmp_path / "other")
    assert "dependency trees" in str(error.value)


def test_changed_trees_are_rejected(corpora, tmp_path):
    """The same words with other edges are other data."""
    trees = tmp_path / "a.conllu"
    trees.write_text(Path(corpora["train"]["source_trees"]).read_text())
    train_on = {**corpora["train"], "source_trees": str(trees)}
    training = {**SECTIONS["training"], "max_steps": 1, "save_steps": 1, "eval_steps": 1}
    plan = recipe_of({**corpora, "train": train_on}, training=training, average={"count": 1}, test={})
    train(plan, tmp_path / "run")
    trees.write_text(trees.read_text().replace("r1:s", "r2:s"))
    with rejects("60 sentence pairs", field="data.train"):
        train(plan, tmp_path / "run", resume=True)


def test_corpora_without_trees_are_named(corpora, tmp_path, caplog):
    plain = {name: value for name, value in corpora["validation"].items() if name != "tree_columns"}
    recipe = recipe_of({**corpora, "validation": {**plain, "source_column": "de"}}, test={})
    tokenizers = TokenizerPair(train_tokenizer(["a b"], "bpe", 20))
    with caplog.at_level("WARNING", logger=progress_logger.name):
        assert prepare_trees(Plan.of(recipe, tmp_path).data, tokenizers).relations == tokenizers.relations
        assert "data.validation[0]" in caplog.text and "source_trees" not in caplog.text
        data = Plan.of(recipe_of({**corpora, "train": recipe.data.validation[0]}, test={}), tmp_path).data
        assert prepare_trees(data, tokenizers) is None
    assert "source_trees" in caplog.text
