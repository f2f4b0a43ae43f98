"""Training runs: from raw text to a model, on one and two processes."""

import copy
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from other_processes import launched, output_of
from safetensors.torch import load_file
from test_kills import PAIRS, tiny
from user_errors import rejects

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.data.prepared import prepare_dataset
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.inference import Translator
from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.inference.results import Hypothesis, Translation
from recnmt_hf.training.arguments import TranslationTrainingArguments
from recnmt_hf.training.checkpoints import newest_checkpoint
from recnmt_hf.training.evidence import Evidence
from recnmt_hf.training.metrics import TextScorer
from recnmt_hf.training.plan import Plan
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train
from recnmt_hf.training.testing import GRID, N_BEST, tune_length_penalty
from recnmt_hf.training.trainer import NonFiniteLossError, TranslationTrainer


SIZES = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
STEPS = {"max_steps": 12, "eval_steps": 6, "save_steps": 3, "logging_steps": 3, "warmup_steps": 4}
SMALL = {
    "model": {"preset": "tiny", "fields": {**SIZES, "dropout": 0.2, "attention_dropout": 0.1}},
    "data": {"train": [{"generated": "train", "size": 150}], "validation": [{"generated": "validation", "size": 12}]},
    "tokenizer": {"kind": "word", "vocab_size": 500},
    "training": {
        **{"use_cpu": True, "disable_tqdm": True, "keep_last": 10, "bleu_samples": 4, **STEPS},
        **{"learning_rate": 2e-3, "max_tokens": 300, "gradient_accumulation_steps": 2},
    },
    "decoding": {"beams": 2, "max_length_extra": 5},
    "average": {"count": 2},
}


RNMT = {"type": "rnmt", "preset": "tiny", "fields": {"d_model": 32, "dropout": 0.2, "init_uniform": None}}


def recipe(**sections):
    merged = {name: dict(value) for name, value in SMALL.items()}
    for name, value in sections.items():
        merged[name] = {**merged.get(name, {}), **value}
    return merged


def test_whole_loop(tmp_path):
    """Tokenizer, training, averaging and test; the model loads and translates, and a second run is rejected."""
    plan = Recipe(**recipe(test={"unseen": {"generated": "test", "size": 6}}))
    folder = train(plan, tmp_path / "run")
    assert folder == tmp_path / "run" / "model"
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["averaged"] == ["checkpoint-9", "checkpoint-12"]
    assert results["unseen"]["sentences"] == 6 and results["unseen"]["signature"].startswith("nrefs:1|case:mixed")
    assert len((tmp_path / "run" / "model-unseen.de").read_text().splitlines()) == 6
    state = json.loads((tmp_path / "run" / "checkpoint-12" / "trainer_state.json").read_text())
    evaluations = [entry for entry in state["log_history"] if "eval_bleu" in entry]
    assert [entry["step"] for entry in evaluations] == [6, 12]
    assert evaluations[0]["eval_perplexity"] == pytest.approx(math.exp(evaluations[0]["eval_loss"]))
    assert Translator.from_pretrained(folder, device="cpu")(["The dog sleeps."])[0].hypotheses
    assert json.loads((folder / "config.json").read_text())["use_cache"], "generation needs the cache"
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.pt"))
    with rejects(field=str(tmp_path / "run"), kind=FileExistsError):
        train(plan, tmp_path / "run")


def test_sentences_of_the_training_text_are_counted(tmp_path, caplog):
    """Apart from case, punctuation and spaces; the score without them is kept too."""
    (one, two), (three, four) = (line.split("\t") for line in Path(PAIRS["tsv"]).read_text().splitlines()[-2:])
    lines = f"{one.upper()}\t{two}\n{three}  -- !\t{four}\nAn unseen one.\tEin neuer.\n...\t...\n"
    (tmp_path / "t.tsv").write_text(lines)
    tests = {"seen": {"tsv": str(tmp_path / "t.tsv")}, "same": PAIRS}
    folder = train(tiny(test=tests, training={"max_steps": 1, "eval_strategy": "no"}), tmp_path / "run")
    assert "2 sentences are in the training text" in caplog.text and "test.same is the validation set" in caplog.text
    seen = next(test for test in Evidence.load(folder).tests if test.name == "seen")
    assert seen.seen == 2 and set(seen.clean_scores) == {"bleu"} and seen.length_ratio is not None


def trainer_for(tmp_path, tokenizer, model=None, corpus=None, guided_alignment=None, **settings):
    corpus, place = corpus or {"generated": "validation", "size": 24}, tmp_path.parent / "data"
    data = prepare_dataset(corpus, "en", "de", tokenizer, tokenizer, place, keep_text=True)
    fields = {"vocab_size": len(tokenizer), "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    torch.manual_seed(1)
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", dropout=0.0, **fields)
    model = model or recnmt_hf.NMTTransformerForConditionalGeneration(config)
    settings = {"max_steps": 2, "learning_rate": 1e-3, "optim": "sgd", "max_grad_norm": 0.0, **settings}
    settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = TranslationTrainingArguments(output_dir=str(tmp_path / "out"), **settings)
    given = {"tokenizer": tokenizer, "train_dataset": data, "eval_dataset": data}
    return TranslationTrainer(model, arguments, **given, guided_alignment=guided_alignment)


def test_resuming_in_python_skips_incomplete_checkpoints(tmp_path, tokenizer, capsys):
    settings = {"max_steps": 4, "save_steps": 1}
    with rejects(field=str(tmp_path / "out")):
        trainer_for(tmp_path, tokenizer, **settings).train(resume_from_checkpoint=True)
    trainer = trainer_for(tmp_path, tokenizer, **settings)
    trainer.train()
    expected = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    (tmp_path / "out/checkpoint-4/complete.json").unlink()
    (tmp_path / "out/checkpoint-4/trainer_state.json").unlink()  # killed while it was written
    resumed = trainer_for(tmp_path, tokenizer, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.steps_before == 3
    for parameter, other in zip(resumed.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=0)


def test_schedule_free_optimizers_are_switched_before_weights_are_read(tmp_path, tokenizer):
    """`eval` of such an optimizer puts the averaged weights into the model: they are evaluated and saved."""
    trainer = trainer_for(tmp_path, tokenizer)
    trainer.train()
    before = trainer.evaluate()["eval_loss"]
    weight = trainer.model.model.shared.weight

    def switch():
        weight.data.fill_(0.5)

    trainer.optimizer = SimpleNamespace(eval=switch, state_dict=dict, param_groups=[])
    trainer._save_checkpoint(trainer.model, None)
    saved = load_file(newest_checkpoint(tmp_path / "out") / "model.safetensors")
    assert (saved["model.shared.weight"] == 0.5).all()
    weight.data.normal_()
    found = trainer.evaluate()["eval_loss"]
    assert (weight == 0.5).all() and found != before


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_equals_one_big_batch(tmp_path, tokenizer, smoothing):
    """24 sentences at once, and in as many batches as fit 300 tokens: the same step."""
    weights = []
    for part, max_tokens in enumerate((10**6, 300)):
        settings = {"max_steps": 1, "label_smoothing_factor": smoothing, "max_tokens": max_tokens}
        counting = trainer_for(tmp_path / str(part), tokenizer, **settings)
        batches = len(counting.token_sampler(counting.train_dataset, True))
        assert (batches == 1) == (part == 0)
        trainer = trainer_for(tmp_path / str(part), tokenizer, gradient_accumulation_steps=batches, **settings)
        trainer.train()
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-6, rtol=1e-5)


def test_evaluation_loss_is_per_token(tmp_path, tokenizer):
    trainer = trainer_for(tmp_path, tokenizer, max_tokens=200, bleu_samples=0)
    found = trainer.evaluate()["eval_loss"]
    total = count = 0.0
    for row in trainer.eval_dataset:
        labels = torch.tensor([row["labels"]])
        total += trainer.model(torch.tensor([row["input_ids"]]), labels=labels).loss.item() * labels.numel()
        count += labels.numel()
    assert found == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("generates", [True, False])
def test_predictions_are_in_the_order_of_the_data(tmp_path, tokenizer, generates):
    """Each sentence gets the prediction that it gets alone, by the moving average if there is one."""
    settings = {"predict_with_generate": generates, "generation_max_length": 6, "max_tokens": 100, "ema_decay": 0.5}
    trainer = trainer_for(tmp_path, tokenizer, bleu_samples=0, learning_rate=1.0, **settings)
    trainer.train()
    data = trainer.eval_dataset
    output = trainer.predict(data)
    with trainer.moving_average.applied():
        for row, predicted, labels in zip(data, output.predictions, output.label_ids, strict=True):
            assert labels[: len(row["labels"])].tolist() == row["labels"]
            ids = torch.tensor([row["input_ids"]])
            if generates:
                alone = trainer.model.generate(input_ids=ids, max_length=6)[0]
                assert predicted[: len(alone)].tolist() == alone.tolist()
            else:
                alone = trainer.model(input_ids=ids, labels=torch.tensor([row["labels"]])).logits[0].detach()
                torch.testing.assert_close(torch.from_numpy(predicted)[: len(alone)], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_stops_and_is_never_saved(tmp_path, tokenizer, what):
    """A loss, or the gradient of a finite loss: the checkpoint before it stays, though only one is kept."""
    trainer = trainer_for(tmp_path, tokenizer, max_steps=4, save_steps=1, max_tokens=200, bleu_samples=0, keep_last=1)

    def poisoned(value):
        return value * float("nan") if trainer.state.global_step == 1 else value

    if what == "loss":
        compute = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: poisoned(compute(*args, **kwargs))
    else:
        next(trainer.model.parameters()).register_hook(poisoned)
    with rejects("learning_rate", tmp_path / "out/checkpoint-1", kind=NonFiniteLossError):
        trainer.train()
    assert newest_checkpoint(tmp_path / "out").name == "checkpoint-1"
    tensors = load_file(tmp_path / "out/checkpoint-1/model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize(("name", "start", "smoothing"), [("Marian", 0, 0.0), ("Bart", 1, 0.1), ("M2M100", 2, 0.1)])
def test_other_models_of_transformers_train_too(tmp_path, tokenizer, name, start, smoothing):
    """They ignore loss keywords, so the trainer normalizes the loss; the collator makes the decoder's input."""
    sizes = {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": 2, "decoder_start_token_id": start}
    settings = {"vocab_size": len(tokenizer), "d_model": 16, **sizes, **ids, "forced_eos_token_id": None}
    config = getattr(transformers, f"{name}Config")(**settings, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0)
    torch.manual_seed(1)
    kind = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    model = getattr(transformers, kind)(config)
    training = {"gradient_accumulation_steps": 2, "max_tokens": 200, "logging_steps": 1, "bleu_samples": 2}
    trainer = trainer_for(tmp_path, tokenizer, model, label_smoothing_factor=smoothing, **training)
    (batch, *_) = trainer.loader(trainer.train_dataset, trainer.token_sampler(trainer.train_dataset, False))
    inputs, labels = batch["decoder_input_ids"], batch["labels"]
    assert (inputs[:, 0] == start).all()
    assert torch.equal(inputs[:, 1:][labels[:, :-1] >= 0], labels[:, :-1][labels[:, :-1] >= 0])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(loss < 1.5 * math.log(len(tokenizer)) for loss in losses)
    assert trainer.evaluate()["eval_bleu"] >= 0


def test_warm_start_from_a_recipe(tmp_path, capsys):
    train(Recipe(**recipe(training={"max_steps": 2, "save_steps": 2, "eval_strategy": "no"})), tmp_path / "base")
    err = capsys.readouterr().err
    assert "Final model: checkpoint-2." in err and "fewer checkpoints than average.count=2" in err
    warm = recipe(training={"max_steps": 1, "learning_rate": 0.0, "eval_strategy": "no"}, average={"count": 1})
    warm["model"] = {**warm["model"], "init_from": str(tmp_path / "base" / "checkpoint-2")}
    warm["tokenizer"] = {}  # the baseline's
    train(Recipe(**warm), tmp_path / "warm")
    before = load_file(tmp_path / "base" / "checkpoint-2" / "model.safetensors")
    after = load_file(tmp_path / "warm" / "model" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    train_tokenizer(["q w e r t"], "word", 20).save_pretrained(tmp_path / "others")
    with rejects(field="tokenizer.source"):
        train(Recipe(**{**warm, "tokenizer": {"source": str(tmp_path / "others")}}), tmp_path / "other")
    # Resuming needs the baseline no more: neither its weights nor its vocabulary.
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(tmp_path / "warm" / "model")
    train(Recipe(**warm), tmp_path / "warm", resume=True)
    assert (tmp_path / "warm" / "model" / "model.safetensors").is_file()
    with pytest.raises(FileNotFoundError, match="base/checkpoint-2"):
        train(Recipe(**warm), tmp_path / "another")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, repository):
    """
    The same batches on two processes and on one with accumulation: the same weights, dropout off (and batch norm, whose
    statistics are each process's own).
    """
    plan = recipe(training={"max_steps": 6, "save_steps": 6, "eval_strategy": "no", "gradient_accumulation_steps": 1})
    off = {"dropout": 0.0, "readout_dropout": 0.0, "relation_batch_norm": False}
    plan["model"] = {**RNMT, "fields": {**RNMT["fields"], **off}}
    (tmp_path / "recipe.json").write_text(json.dumps(plan))
    output_of(launched(repository / "scripts/train.py", tmp_path / "recipe.json", "--output", tmp_path / "two"))
    plan["training"]["gradient_accumulation_steps"] = 2
    made = TranslationTrainer.token_sampler

    def as_for_two(self, dataset, shuffle):
        sampler = made(self, dataset, shuffle)
        if shuffle:
            lengths, settings = (sampler.source_lengths, sampler.target_lengths), vars(sampler.limits)
            pairs = type(sampler)(*lengths, **settings, num_processes=2, seed=sampler.seeds)
            sampler.batches = lambda: (pairs.set_epoch(sampler.epoch), pairs.batches())[1]
        return sampler

    with mock.patch.object(TranslationTrainer, "token_sampler", as_for_two):
        train(Recipe(**plan), tmp_path / "one")
    two, one = (load_file(tmp_path / run / "checkpoint-6" / "model.safetensors") for run in ("two", "one"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("limit", "layers", "expected"), [(None, 1, 64 * 90), (500, 1, 500), (0, 1, None), (None, 0, None)]
)
def test_batches_of_a_model_of_pairs_bound_squared_lengths(tmp_path, tokenizer, limit, layers, expected):
    """RNMT compares all pairs of words; its baseline without relation layers does not."""
    fields = {"vocab_size": len(tokenizer), "d_model": 32, "relation_layers": layers}
    model = recnmt_hf.RNMTForConditionalGeneration(recnmt_hf.RNMTConfig.from_preset("tiny", **fields))
    trainer = trainer_for(tmp_path, tokenizer, model, max_tokens=90, max_squared_tokens=limit)
    trainer.get_train_dataloader()
    assert trainer.train_sampler.limits.max_squared_tokens == expected
    lengths = trainer.train_sampler.source_lengths
    costs = [len(batch) * max(lengths[batch]) ** 2 for batch in trainer.train_sampler.batches() if len(batch) > 1]
    assert max(costs) <= (expected or 90 * max(lengths))


def test_norms_of_averaged_weights_are_recomputed(tmp_path):
    """The averaged RNMT has the statistics of its own weights, not the mean of the checkpoints' statistics."""
    plan = recipe(training={"gradient_accumulation_steps": 1})
    plan["model"] = RNMT
    folder = train(Recipe(**plan), tmp_path / "run")
    found = load_file(folder / "model.safetensors")
    parts = [load_file(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors") for step in (9, 12)]
    name = "model.encoder.relation_layers.0.convolutions.norms.0"
    assert not torch.allclose(found[f"{name}.running_mean"], parts[0][f"{name}.running_mean"], atol=1e-4)
    for key in found:
        if "running" not in key:
            torch.testing.assert_close(found[key], (parts[0][key] + parts[1][key]) / 2)
    # They are nearly those of one batch of all the data.
    translator = Translator.from_pretrained(folder, device="cpu")
    model = translator.model
    tokenizers = translator.tokenizer, translator.tokenizer
    data = prepare_dataset(plan["data"]["train"], "en", "de", *tokenizers, tmp_path / "run/data")
    rows = [torch.tensor(row) for row in data["input_ids"][:]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    norm = model.get_submodule(name)
    norm.train().momentum = 1.0
    with torch.no_grad():
        model.get_encoder()(ids, (ids != 0).long())
    torch.testing.assert_close(norm.running_mean, found[f"{name}.running_mean"], atol=0.05, rtol=0.1)
    torch.testing.assert_close(norm.running_var, found[f"{name}.running_var"], atol=0.05, rtol=0.1)


def test_every_score_has_the_tokenizer_of_the_target_language(tmp_path, capsys):
    for side, lines in (("en", ["one two three", "two one two"]), ("zh", ["一二三。", "二一二。"])):
        (tmp_path / f"pairs.{side}").write_text("".join(f"{line}\n" for line in lines))
    corpus = {"source": str(tmp_path / "pairs.en"), "target": str(tmp_path / "pairs.zh")}
    plan = recipe(
        data={"target_lang": "zho_Hans", "train": [corpus], "validation": [corpus]},
        tokenizer={"target_kind": "character", "joint": False, "vocab_size": 30},
        training={"max_steps": 2, "eval_steps": 1, "save_steps": 1, "gradient_accumulation_steps": 1},
        average={"count": 1},
        test={"unseen": corpus},
    )
    folder = train(Recipe(**plan), tmp_path / "run")
    assert "tok:zh" in Evidence.load(folder).tests[0].signature
    scorer = Plan.of(Recipe(**plan), tmp_path).arguments.scorer
    assert "tok:zh" in scorer.compare(["一二三。"], ["二一二。"], ["一二三。"], samples=2).signature
    for signature, words in (("tok:zh", []), ("tok:char", ["--tokenize", "char"])):
        capsys.readouterr()
        test = ["test", f"{tmp_path}/run", *words, "--set", "again", corpus["source"], corpus["target"]]
        assert main(test) == 0 and signature in capsys.readouterr().out
    plan["training"]["bleu_tokenize"] = "none"
    assert Recipe(**plan).training.bleu_tokenize == "none"


def test_both_sides_are_padded_on_the_right(tmp_path, tokenizer):
    """Also with a tokenizer that pads on the left for other uses, which stays as it is."""
    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    batches = []
    for own in (tokenizer, left):
        trainer = trainer_for(tmp_path, own, max_tokens=200)
        sampler = trainer.token_sampler(trainer.train_dataset, False)
        batches.append(next(iter(trainer.loader(trainer.train_dataset, sampler))))
    assert left.padding_side == "left" and set(batches[0]) == {"input_ids", "attention_mask", "labels"}
    assert (batches[0]["labels"][:, -1] == -100).any() and (batches[0]["labels"][:, 0] != -100).all()
    assert torch.equal(batches[0]["attention_mask"] == 1, batches[0]["input_ids"] != tokenizer.pad_token_id)
    assert all(torch.equal(tensor, batches[1][name]) for name, tensor in batches[0].items())


def test_adadelta(tmp_path, tokenizer):
    settings = {"optimizer": "adadelta", "adadelta_rho": 0.9, "adadelta_eps": 1e-5, "learning_rate": 0.5}
    trainer = trainer_for(tmp_path, tokenizer, max_tokens=200, save_steps=1, **settings)
    trainer.train()
    group = torch.load(tmp_path / "out/checkpoint-2/optimizer.pt", weights_only=True)["param_groups"][0]
    assert (group["initial_lr"], group["rho"], group["eps"]) == (0.5, 0.9, 1e-5)
    own = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    settings = {"tokenizer": tokenizer, "train_dataset": trainer.train_dataset, "optimizers": (own, None)}
    assert TranslationTrainer(trainer.model, trainer.args, **settings).create_optimizer() is own


SHORT, LONG = "the dog sleeps here", "the dog sleeps here in the house today"


@pytest.mark.parametrize(("reference", "is_long"), [(LONG, True), (SHORT, False)])
def test_long_references_need_a_larger_exponent(reference, is_long):
    """-4 / ((5 + 4) / 6)^a against -5 / ((5 + 8) / 6)^a: the longer one is better from a = 0.61 on."""
    seen = []

    def translate(sources, options):
        seen.append(options)
        hypotheses = [Hypothesis(SHORT, 0.0, -4.0, [1] * 4), Hypothesis(LONG, 0.0, -5.0, [1] * 8)]
        return [Translation(source, hypotheses) for source in sources]

    translator = SimpleNamespace(translate=translate)
    scores = tune_length_penalty(translator, ["x"] * 3, [[reference] * 3], DecodingOptions(beams=4), TextScorer())
    assert all((scores[a] == pytest.approx(100)) == ((a > 0.61) == is_long) for a in GRID)
    assert next(iter(scores.values())) == max(scores.values())
    assert (seen[0].beams, seen[0].num_hypotheses, seen[0].split_sentences) == (N_BEST, N_BEST, "never")
