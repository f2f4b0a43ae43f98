"""Guided alignment: links as data, the loss against a slow reference, and training with it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_training import SMALL, trainer_for
from test_training import recipe as small
from user_errors import rejects

import recnmt_hf
from recnmt_hf.data.alignments import collate_links
from recnmt_hf.data.corpora import Corpus
from recnmt_hf.data.prepared import prepare_dataset, tokenizer_fingerprint
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.inference import Translator
from recnmt_hf.training.guided_alignment import AlignmentGuide, GuidedAlignment
from recnmt_hf.training.inputs import mix
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import digest_of, train


SOURCES = ["unbelievable dogs bark", "a cat", "the dogs sleep"]
TARGETS = ["unglaubliche Hunde bellen laut", "eine Katze", "die Hunde schlafen"]
LINKS = ["0-0 1-1 2-2 2-3", "", "2-2 0-0 1-1 1-1"]
SIZES = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer that cuts rare words into pieces."""
    return train_tokenizer(["the dogs sleep", "die Hunde schlafen", "a cat", "eine Katze"] * 2, "bpe", 60)


def written(folder, *lines):
    """The fields of a corpus with links, whose files are written into a folder."""
    files = {name: folder / name for name in ("source", "target", "alignments")}
    for path, content in zip(files.values(), lines, strict=True):
        path.write_text("".join(f"{line}\n" for line in content))
    return {name: str(path) for name, path in files.items()}


@pytest.fixture
def corpus(tmp_path):
    return written(tmp_path, SOURCES, TARGETS, LINKS)


def prepare(corpora, tokenizer, folder, **settings):
    return prepare_dataset(corpora, "en", "de", tokenizer, tokenizer, folder / "data", **settings)


def pairs_of(row):
    return list(zip(row["links"][::2], row["links"][1::2], strict=True))


def words(tokenizer, text):
    """For each word its positions among the tokens, by tokenizing it alone."""
    places, start = [], 0
    for word in text.split():
        count = len(tokenizer(word)["input_ids"]) - 1
        places.append(range(start, start + count))
        start += count
    return places


def test_links_of_words_become_links_of_their_pieces(corpus, pieces, tmp_path):
    data = prepare(corpus, pieces, tmp_path)
    assert data.column_names == ["input_ids", "labels", "source_length", "target_length", "links"]
    for row, source, target, line in zip(data, SOURCES, TARGETS, LINKS, strict=True):
        own, other = words(pieces, source), words(pieces, target)
        expected = {(i, j) for link in line.split() for i in own[int(link[0])] for j in other[int(link[2])]}
        assert set(pairs_of(row)) == expected and len(pairs_of(row)) == len(expected)
    assert len(words(pieces, SOURCES[0])[0]) > 1, "a word of several pieces"


def test_links_of_tokens_and_corpora_without_links(corpus, pieces, tmp_path):
    plain = {name: corpus[name] for name in ("source", "target")}
    mixed = prepare([{**corpus, "alignment_units": "tokens"}, plain], pieces, tmp_path, keep_text=True)
    expected = [[(0, 0), (1, 1), (2, 2), (2, 3)], [], [(0, 0), (1, 1), (2, 2)]]
    assert [pairs_of(row) for row in mixed] == expected + [[]] * 3
    assert mixed["source"][:] == SOURCES * 2
    without = prepare(plain, pieces, tmp_path)
    interleaved = mix([without, prepare(corpus, pieces, tmp_path)], 2.0, seed=1)
    assert all((len(row["links"]) > 0) <= (row["corpus"] == 1) for row in interleaved) and digest_of(interleaved)
    assert without.column_names == ["input_ids", "labels", "source_length", "target_length"]
    assert Corpus(**plain).fingerprint()[0].keys().isdisjoint({"alignments", "alignment_units"})
    assert digest_of(without) != digest_of(prepare(corpus, pieces, tmp_path))


def test_truncation_drops_links_and_skipped_pairs_keep_theirs(corpus, pieces, tmp_path):
    whole = prepare(corpus, pieces, tmp_path)
    cut = prepare(corpus, pieces, tmp_path, max_source_length=4, max_target_length=5, on_long="truncate")
    for row, long in zip(cut, whole, strict=True):
        ends = len(row["input_ids"]) - 1, len(row["labels"]) - 1
        assert row["input_ids"][-1] == row["labels"][-1] == 2
        assert pairs_of(row) == [(i, j) for i, j in pairs_of(long) if i < ends[0] and j < ends[1]]
    assert len(cut[0]["links"]) < len(whole[0]["links"])
    (tmp_path / "source").write_text(f"{SOURCES[0]}\n\n{SOURCES[2]}\n")
    skipped = prepare(corpus, pieces, tmp_path, on_empty="skip")
    assert [pairs_of(row) for row in skipped] == [pairs_of(whole[0]), pairs_of(whole[2])]


def test_bad_files_are_named_with_their_line(corpus, pieces, tmp_path):
    path = corpus["alignments"]
    for text, units, line in (
        ("0-0\n\n0_0\n", "words", 3),
        ("3-0\n\n\n", "words", 1),
        ("\n0-2\n\n", "words", 2),
        ("\n\n0-99\n", "tokens", 3),
        ("0-0\n\n", "words", None),
        ("0-0\n\n\n0-0\n", "words", None),
    ):
        Path(path).write_text(text)
        with rejects(field=f"{path}, line {line}" if line else None):
            prepare({**corpus, "alignment_units": units}, pieces, tmp_path)
    assert not [entry for entry in (tmp_path / "data").iterdir() if entry.name.endswith(tokenizer_fingerprint(pieces))]


def test_a_batch_of_links_has_a_distribution_for_each_linked_token():
    batch = {"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2, 3)}
    links = collate_links([[0, 0, 2, 0, 3, 2], []], batch)
    expected = torch.zeros(2, 3, 4)
    expected[0, 0, 0] = expected[0, 0, 2] = 0.5
    expected[0, 2, 3] = 1.0
    assert torch.equal(links, expected)
    assert not collate_links([[], []], batch).any()


def slow_loss(model, batch, links, layer, head):
    """-sum p(i|j) log(a_ij + 1e-6) of one layer and head, from the attentions that the model returns."""
    attention = model(**batch, output_attentions=True).cross_attentions[layer][:, head]
    total = torch.zeros(())
    for b, j, i in links.nonzero().tolist():
        total = total - links[b, j, i] * torch.log(attention[b, j, i] + 1e-6)
    return total


def example(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    labels = torch.randint(4, 60, (2, 5), generator=generator)
    labels[1, 3:] = -100
    batch = {"input_ids": torch.randint(4, 60, (2, 7), generator=generator), "attention_mask": mask, "labels": labels}
    links = torch.zeros(2, 5, 7)
    for b, j, i in ((0, 0, 1), (0, 0, 2), (0, 3, 6), (1, 0, 0), (1, 2, 3)):
        links[b, j, i] = 1
    return batch, links / links.sum(-1, keepdim=True).clamp(min=1)


MODELS = {
    "NMTTransformer": {},
    "GRET": {},
    "BiARNTransformer": {},
    "RPETransformer": {},
    "ONLSTMTransformer": {"encoder_layer_types": ["onlstm", "attention"]},
    "RNMT": {"decoder_layers": 1},
}


def build(prefix, **fields):
    fields = {**SIZES, **MODELS[prefix], **fields}
    torch.manual_seed(3)
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", **fields)
    return getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)


@pytest.mark.parametrize("prefix", MODELS)
def test_loss_and_gradient_are_those_of_the_slow_reference(prefix):
    """With any model, label smoothing, the divisor of a step, and without logits."""
    batch, links = example()
    settings = {"smoothing": 0.1, "num_items_in_batch": 11}
    losses, gradients = [], []
    layer, head = 0, 0 if prefix == "RNMT" else 3
    for guided in (False, True):
        model = build(prefix).train()
        if guided:
            AlignmentGuide(model, GuidedAlignment(weight=0.3, layer=layer, head=head))
            loss = model(**batch, links=links, return_logits=False, **settings).loss
        else:
            loss = model(**batch, **settings).loss + 0.3 * slow_loss(model, batch, links, layer, head) / 11
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(*gradients, atol=2e-6, rtol=2e-4)


def test_without_links_or_in_evaluation_nothing_changes():
    batch, links = example()
    plain, guided = build("NMTTransformer"), build("NMTTransformer")
    guide = AlignmentGuide(guided, GuidedAlignment())
    expected = plain(**batch).loss
    assert torch.equal(guided(**batch).loss, expected) and not guide.means.totals["alignment_loss"]
    assert torch.equal(guided.eval()(**batch, links=links).loss, plain.eval()(**batch).loss)
    loss = guided.train()(**batch, links=links).loss
    total, count = guide.means.totals["alignment_loss"].tolist()
    assert count == pytest.approx(4)
    labels = (batch["labels"] != -100).sum()
    torch.testing.assert_close(loss, expected + 0.1 * total / labels, check_dtype=False)


def test_weights_are_those_before_dropout():
    batch, links = example()
    totals = []
    for dropout in (0.0, 0.9):
        model = build("NMTTransformer", decoder_layers=1, attention_dropout=dropout)
        guide = AlignmentGuide(model.train(), GuidedAlignment())
        model.model.encoder.eval()
        model.model.decoder.layers[0].self_attn.eval()
        model(**batch, links=links)
        totals.append(guide.means.totals["alignment_loss"][0])
    torch.testing.assert_close(*totals)


@pytest.mark.parametrize("way", ["checkpoints", "compiled"])
def test_gradient_checkpointing_and_compiling_change_nothing(way):
    batch, links = example()
    gradients = []
    for changes in (False, True):
        model = build("NMTTransformer", encoder_layers=1).train()
        AlignmentGuide(model, GuidedAlignment(weight=1.0))
        run = torch.compile(model, backend="eager", fullgraph=True) if changes and way == "compiled" else model
        if changes and way == "checkpoints":
            model.gradient_checkpointing_enable()
        run(**batch, links=links, return_logits=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*gradients)


def test_models_and_heads_that_cannot_be_guided():
    for prefix, fields, field in (
        ("NMTTransformer", {"layer": 2}, "guided_alignment.layer"),
        ("NMTTransformer", {"head": 4}, "guided_alignment.head"),
        ("RNMT", {"head": 1}, "guided_alignment.head"),
    ):
        with rejects(field=field):
            AlignmentGuide(build(prefix), GuidedAlignment(**fields))
    with rejects("does not attend to source"):
        AlignmentGuide(build("BiARNTransformer", decoder_memory="recurrence"), GuidedAlignment())


@pytest.fixture(scope="module")
def linked_text(tmp_path_factory):
    """A corpus in which a target word translates the source word in the mirrored position."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, 6, (150,), generator=generator).tolist()
    rows = [torch.randint(0, 12, (size,), generator=generator).tolist() for size in sizes]
    sources = [" ".join(f"s{n}" for n in row) for row in rows]
    targets = [" ".join(f"t{n}" for n in reversed(row)) for row in rows]
    links = [" ".join(f"{i}-{size - 1 - i}" for i in range(size)) for size in sizes]
    return written(tmp_path_factory.mktemp("linked"), sources, targets, links)


def recipe(corpus, **sections):
    data = {"train": [corpus], "validation": [{name: corpus[name] for name in ("source", "target")}]}
    return Recipe(**small(data=data, tokenizer={"kind": "space", "vocab_size": 40}, **sections))


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def test_a_guided_run_and_its_resumption(linked_text, tmp_path):
    """The head is recorded and read by word alignment, its loss is logged, and resuming is bit-identical."""
    model = {"fields": {**SMALL["model"]["fields"], "decoder_layers": 2}}
    plan = recipe(linked_text, model=model, guided_alignment={"layer": 0, "head": 1, "weight": 2.0})
    whole = tmp_path / "whole"
    final = train(plan, whole)
    config = json.loads((final / "config.json").read_text())
    assert config["alignment_head"] == [0, 1]
    state = json.loads((whole / "checkpoint-12" / "trainer_state.json").read_text())
    logged = [entry["alignment_loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(logged) == 4 and all(0 < value < -math.log(1e-6) for value in logged) and logged[-1] < logged[0]
    evaluated = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert len(evaluated) == 2 and "links" not in state
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    for name in ("checkpoint-9", "checkpoint-12", "model"):
        shutil.rmtree(part / name)
    again = train(plan, part, resume=True)
    for folder in ("checkpoint-12", "model"):
        one, other = weights_of(whole / folder), weights_of(part / folder)
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    translator = Translator.from_pretrained(again, device="cpu")
    ids = [translator.encode_source("s1 s2")], [translator.encode_target("t2 t1")]
    first, second = (translator.attention(*ids, *place, 4096)[0] for place in ((None, None), (0, 1)))
    assert (first == second).all()
    changed = recipe(linked_text, model=model, guided_alignment={"layer": 0, "head": 1, "weight": 1.0})
    with rejects(field="guided_alignment.weight"):
        train(changed, part, resume=True)


def test_weight_zero_reads_no_links(linked_text, tmp_path):
    """The run is bit-identical to that of the corpus without links."""
    plain = {name: linked_text[name] for name in ("source", "target")}
    short = {"max_steps": 3, "eval_steps": 3}
    runs = []
    for corpus, guided in ((linked_text, {"weight": 0}), (plain, {})):
        runs.append(train(recipe(corpus, training=short, guided_alignment=guided), tmp_path / str(len(runs))))
    one, other = (weights_of(run) for run in runs)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert json.loads((runs[0] / "config.json").read_text())["alignment_head"] is None


def test_accumulation_equals_one_big_batch(linked_text, tmp_path):
    """The loss of the links has the divisor of the main loss. Predictions do not read the links."""
    tokenizer = train_tokenizer([" ".join(f"{side}{n}" for n in range(12) for side in "st")], "space", 40)
    settings = {"max_steps": 1, "learning_rate": 1e-2, "label_smoothing_factor": 0.1, "predict_with_generate": True}
    settings |= {"corpus": linked_text, "guided_alignment": GuidedAlignment(weight=1.0)}

    def built(**changes):
        model = build("NMTTransformer", vocab_size=len(tokenizer))
        return trainer_for(tmp_path, tokenizer, model, **settings, **changes)

    one, many = built(max_tokens=10**6), built(max_tokens=250)
    count = len(many.token_sampler(many.train_dataset, True))
    trainers = one, built(max_tokens=250, gradient_accumulation_steps=count)
    for trainer in trainers:
        trainer.train()
    assert count > 3
    for one, other in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert len(trainer.predict(trainer.eval_dataset.select(range(6)), max_length=8).predictions) == 6
