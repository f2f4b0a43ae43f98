"""Recipes that cannot be right: each ends in one sentence that names the place, and nothing is written."""

import math
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from transformers.training_args import OptimizerNames

from recnmt_hf.commands.main import main
from recnmt_hf.models.user_errors import MissingFileError, UserError
from recnmt_hf.training import recipe_yaml
from recnmt_hf.training.arguments import TranslationTrainingArguments
from recnmt_hf.training.checks import check_before_training
from recnmt_hf.training.metrics import higher_is_better
from recnmt_hf.training.processes import logger
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train
from recnmt_hf.training.trainer import TranslationTrainer


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))

# Content of a recipe, and what its message must hold.
TABLE = (Path(__file__).parent / "bad_recipes.txt").read_text(encoding="utf-8").splitlines()
ROWS = [row.rsplit("  |  ", 1) for row in TABLE if not row.startswith("# ")]


def message_of(act, *arguments):
    """The one sentence that a user sees."""
    with pytest.raises(UserError) as caught:
        act(*arguments)
    message = str(caught.value)
    assert "Remedy: " in message and "\n" not in message and len(message) < 700, message
    return message


@pytest.mark.parametrize("content, expected", ROWS, ids=[row[0] for row in ROWS])
def test_values(tmp_path, content, expected):
    path = tmp_path / "r.yaml"
    path.write_text(f"{content}\n", encoding="utf-8")
    assert expected in message_of(Recipe.from_file, path)


# Overrides on the command line.
OVERRIDES = {
    "max_steps": "'max_steps' is no override. Remedy: write section.field=value",
    "=5": "'=5' is no override",
    "training.=5": "'training.=5' is no override",
    ".seed=5": "'.seed=5' is no override",
    "training..seed=5": "'training..seed=5' is no override",
    "training.seed =5": "'training.seed =5' is no override",
    "training.seed=": "training.seed= has no value. Remedy: write training.seed=null for its default",
    "model.fields.x=": "model.fields.x= has no value",
    "model.fields.x= ": "model.fields.x= has no value",
    "trainin.seed=1": "the recipe has no field 'trainin'; did you mean training?",
    "extends=a.yaml": "the recipe has no field 'extends'",
    "seed=1": "the recipe has no field 'seed'",
    "training.seed.x=1": "training.seed.x cannot be set: training.seed is a number, not a mapping",
    "data.train.0.size=1": "data.train.0.size cannot be set: data.train is a list, not a mapping",
    "model.preset.x.y=1": "model.preset.x.y cannot be set: model.preset is text, not a mapping",
    "training.seed=[": "the value of training.seed, line 1, column 2: no valid YAML",
    "training.seed={a: 1, a: 2}": "a name that occurs twice",
    "training=5": "training must be a mapping of names to values, not a number",
    "training.seed=x": "training.seed='x' is not allowed",
    "training.seed=1 training.seed=2": "training.seed replaces training.seed given before it",
    "training.seed=1 training={seed: 2}": "training replaces training.seed given before it",
}


@pytest.mark.parametrize("given", OVERRIDES, ids=OVERRIDES)
def test_overrides(tmp_path, given):
    path = tmp_path / "r.yaml"
    path.write_text("model: {preset: tiny}\ndata: {train: [{generated: train}]}\ntraining: {seed: 3}\n")
    overrides = given.split(" training", 1)
    overrides = [overrides[0], *(f"training{rest}" for rest in overrides[1:])]
    assert OVERRIDES[given] in message_of(Recipe.from_file, path, overrides)


def test_overrides_may_fill_empty_sections(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model:\ntraining: {}\ntest:\n")
    given = ["model.preset=tiny", "model.fields.dropout=0.2", "training.max_steps=1e3", "model.init_from=null"]
    recipe = Recipe.from_file(path, given)
    assert recipe.model.fields == {"dropout": 0.2} and recipe.model.init_from is None
    assert recipe.training.max_steps == 1000 and isinstance(recipe.training.max_steps, int)


# Files that hold no recipe.
FILES = {
    "bomb": (BOMB.replace("*a0", "x").encode(), "more than 20 aliases"),
    "merged bomb": (
        b"b0: &b0 {k: 1}\n"
        + b"".join(b"b%d: &b%d {<<: [%s]}\n" % (i, i, b", ".join([b"*b%d" % (i - 1)] * 9)) for i in range(1, 12)),
        "more than 20 aliases",
    ),
    "deep": (b"a: " + b"[" * 100_000, "nested more than 32 deep"),
    "deep by aliases": (
        b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (i, i, i - 1) for i in range(1, 60)),
        "more than 20 aliases",
    ),
    "huge": (b"# " + b"x" * 2**20, "more than 1,048,576 bytes"),
    "latin-1": (b"model: {}\ndata: {source_lang: \xe9}\n", "r.yaml, line 2: not UTF-8 text"),
    "utf-16": ("model: {}".encode("utf-16"), "not UTF-8 text"),
    "binary": (bytes(range(128)), "line 1: no valid YAML (a control character)"),
    "surrogate": (b'model: {preset: "\\ud800"}', "model.preset='\\ud800' is not allowed"),
    "second document": (b"model: {}\n---\nmodel: {}\n", "line 2, column 1: no valid YAML"),
    "tabs": (b"model:\n\tpreset: tiny\n", "line 2, column 1: no valid YAML"),
}


@pytest.mark.parametrize("case", FILES, ids=FILES)
def test_files(tmp_path, case):
    content, expected = FILES[case]
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert expected in message_of(Recipe.from_file, path)


def test_places_that_are_no_files(tmp_path):
    (tmp_path / "a.yaml").write_text("{}")
    assert "is a folder; it holds a.yaml. Remedy: name" in message_of(Recipe.from_file, tmp_path)
    assert "holds a.yaml. Remedy: correct" in message_of(Recipe.from_file, tmp_path / "b.yaml")
    assert "There is no recipe" in message_of(Recipe.from_file, tmp_path / "a.yaml" / "b.yaml")
    assert "cannot be read (File name too long)" in message_of(Recipe.from_file, tmp_path / ("x" * 5000))
    assert "/dev/zero is not a regular file" in message_of(Recipe.from_file, "/dev/zero")
    assert "cannot be read" in message_of(Recipe.from_file, "a\0b")
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is not a regular file" in message_of(Recipe.from_file, tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("{}")
    path.chmod(0)
    assert "cannot be read (Permission denied)" in message_of(Recipe.from_file, path)


@pytest.mark.parametrize(
    "content",
    [
        "root:x:0:0:secret:/root:/bin/sh\nbin:x:1:1:secret:/bin:/bin/sh\n",
        "secret: secret\n",
        "- secret\n",
        "a: b: secret\n",
        "'secret\n",
        "x: *secret\n",
        "x: !secret 5\n",
        "extends: [secret]\n",
        "\0secret",
    ],
)
def test_extends_shows_nothing_of_a_foreign_file(tmp_path, content):
    (tmp_path / "foreign").write_text(content)
    path = tmp_path / "r.yaml"
    path.write_text("extends: foreign\n")
    message = message_of(Recipe.from_file, path)
    assert "secret" not in message and str(tmp_path / "foreign") in message


def test_chains_of_recipes_end(tmp_path):
    for number in range(50):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    assert "more than 32 recipes" in message_of(Recipe.from_file, tmp_path / "0.yaml")


def test_words_and_numbers_of_yaml(tmp_path):
    """YAML 1.2: Norwegian is a language, 1:30 no number, 010 ten; what is saved is read back as it was."""
    path = tmp_path / "r.yaml"
    path.write_bytes(
        b"\xef\xbb\xbfdata: {source_lang: no, target_lang: on}\n"
        b"training: {max_steps: 010, eval_strategy: no, save_strategy: off, learning_rate: 5e-4, run_name: 1:30, "
        b"warmup_steps: 0x10}\n".replace(b"save_strategy: off, ", b"")
        + b"test: {2014: {tsv: 2024-01-01}, b: {tsv: '0o17', jsonl: null}, c: {tsv: yes}}\n"
    )
    recipe = Recipe.from_file(path)
    assert (recipe.data.source_lang, recipe.data.target_lang) == ("no", "on")
    training = recipe.training
    assert (training.max_steps, training.eval_strategy, training.learning_rate) == (10, "no", 5e-4)
    assert (training.run_name, training.warmup_steps) == ("1:30", 16)
    assert {name: corpus.tsv for name, (corpus,) in recipe.test.items()} == {
        "2014": "2024-01-01",
        "b": "0o17",
        "c": "yes",
    }
    recipe.save(tmp_path / "again.yaml")
    assert Recipe.from_file(tmp_path / "again.yaml") == recipe
    for text in ("no", "1:30", "0o17", "010", "09", "1e5", "1.5", "~", "null", "true", "<<", "0x1F", ".inf", "", "ü"):
        assert recipe_yaml.load_yaml(recipe_yaml.dump_yaml({"a": text}), "it") == {"a": text}
        assert yaml.safe_load(recipe_yaml.dump_yaml({"a": text})) == {"a": text}


def test_merge_keys_and_aliases_stay(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {fields: &f {dropout: 0.2}}\ntraining: {lr_scheduler_kwargs: {<<: *f, x: 1}}\n")
    assert Recipe.from_file(path).training.lr_scheduler_kwargs == {"dropout": 0.2, "x": 1}


# -- directions of metrics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric, higher",
    [
        ("loss", False),
        ("eval_loss", False),
        ("perplexity", False),
        ("eval_dev_loss", False),
        ("eval_ter", False),
        ("bleu", True),
        ("eval_bleu", True),
        ("eval_accuracy", True),
        ("something", True),
    ],
)
def test_direction_of_a_metric(tmp_path, metric, higher):
    assert higher_is_better(metric) is higher
    arguments = TranslationTrainingArguments(
        output_dir=str(tmp_path), metric_for_best_model=metric, use_cpu=True, report_to="none"
    )
    assert arguments.greater_is_better is higher
    if metric != "something":
        with pytest.raises(UserError, match=f"contradicts metric_for_best_model={metric}"):
            TranslationTrainingArguments(
                output_dir=str(tmp_path), metric_for_best_model=metric, greater_is_better=not higher, use_cpu=True
            )


@pytest.mark.parametrize(
    "training, metric, higher",
    [
        ({}, "bleu", True),
        ({"metric_for_best_model": "loss"}, "loss", False),
        ({"metric_for_best_model": "eval_perplexity"}, "eval_perplexity", False),
        ({"bleu_samples": 0}, "loss", False),
        ({"metric_for_best_model": None}, "bleu", True),
    ],
)
def test_a_recipe_derives_the_direction(tmp_path, training, metric, higher):
    arguments = Recipe(training={**training, "use_cpu": True}).trainer_arguments(tmp_path)
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == (metric, higher)


@pytest.mark.parametrize(
    "name, value",
    [
        ("gradient_accumulation_steps", -1),
        ("label_smoothing_factor", 2),
        ("max_steps", -5),
        ("max_tokens", 0),
        ("adam_beta2", 1.0),
        ("learning_rate", math.nan),
        ("keep_best", -1),
        ("save_steps", 0),
        ("bleu_beams", 0.5),
    ],
)
def test_arguments_without_a_recipe(tmp_path, name, value):
    assert f"{name}={value} is not allowed" in message_of(
        lambda: TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})
    )


# -- before training ---------------------------------------------------------------------------------------------------

# Changes to a small recipe that runs, and what must be said before anything is written.
BEFORE = {
    "preset": ({"model": {"preset": "huge"}}, "model.preset='huge' is not allowed; nmt_transformer has tiny, small"),
    "field": ({"model": {"fields": {"d_modle": 3}}}, "model.fields.d_modle is not allowed: NMTTransformerConfig has"),
    "value": ({"model": {"fields": {"d_model": "wide"}}}, "model.fields: NMTTransformerConfig: d_model='wide'"),
    "heads": ({"model": {"fields": {"encoder_attention_heads": 7}}}, "a divisor of d_model"),
    "field of another": ({"model": {"type": "rnmt", "fields": {"recurrence_steps": 3}}}, "has no recurrence_steps"),
    "null": ({"model": {"fields": {"encoder_layers": None}}}, "encoder_layers=None is not allowed"),
    "wide": (
        {"model": {"preset": "big", "fields": {"d_model": 2**20, "encoder_layers": 900}}},
        "GiB for",
    ),
    "many": ({"model": {"preset": "big", "fields": {"encoder_ffn_dim": 2**20, "encoder_layers": 900}}}, "parameters"),
    "symbols": ({"model": {"fields": {"d_model": 65536}}, "tokenizer": {"vocab_size": 10**7}}, "parameters"),
    "positions": (
        {"model": {"fields": {"max_position_embeddings": 128}}},
        "data.max_source_length=256 is more than the model's positions (max_position_embeddings=128)",
    ),
    "no baseline": ({"model": {"init_from": "./none/model"}}, "model.init_from=./none/model holds no model"),
    "half a baseline": ({"model": {"init_from": "HALF"}}, "holds no model (weights (*.safetensors) missing)"),
    "no tokenizer": ({"tokenizer": {"source": "./none"}}, "tokenizer.source=./none holds no tokenizer"),
    "training file": ({"data": {"train": [{"source": "none.en", "target": "none.de"}]}}, "data.train[0]: There is no"),
    "validation file": ({"data": {"validation": [{"tsv": "none.tsv"}]}}, "data.validation[0]: There is no file"),
    "test file": ({"test": {"a": {"jsonl": "none.jsonl"}}}, "test.a: There is no file none.jsonl"),
    "second test file": ({"test": {"a": [{"generated": "test"}, {"tsv": "x.tsv"}]}}, "test.a[1]: There is no file"),
    "folder": ({"test": {"a": {"tsv": "."}}}, "test.a: . is a folder"),
    "empty file": ({"test": {"a": {"tsv": "EMPTY"}}}, "is empty"),
    "dataset folder": ({"test": {"a": {"dataset": "./none"}}}, "test.a: There is no folder ./none"),
    "languages": ({"data": {"source_lang": "fr"}}, "data.train[0]: The generated corpus is English-German; fr-de"),
    "cache": ({"data": {"cache_dir": "EMPTY"}}, "is no folder. Remedy: choose another"),
    "cache that nobody can write": ({"data": {"cache_dir": "/proc/x"}}, "cannot be written to (No such file or"),
    "schedule": ({"training": {"lr_scheduler_type": "warmup_stable_decay"}}, "warmup_stable_decay cannot be used"),
    "schedule kwargs": ({"training": {"lr_scheduler_kwargs": {"spin": 1}}}, "inverse_sqrt cannot be used"),
    "optimizer": ({"training": {"optim": "adamw_8bit"}}, "training.optim=adamw_8bit cannot be used"),
    "optimizer's arguments": (
        {"training": {"optim": "sgd", "optim_args": "momentum"}},
        "training.optim=sgd, training.optim_args='momentum' cannot be used",
    ),
    "optimizer of modules": (
        {"training": {"optim": "galore_adamw", "optim_target_modules": "all-linear"}},
        "training.optim=galore_adamw, training.optim_target_modules='all-linear' cannot be used",
    ),
    "checkpointing": (
        {"training": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"reentrant": False}}},
        "training.gradient_checkpointing_kwargs={'reentrant': False} is not allowed (Unexpected keyword arguments: ree",
    ),
    "layers of checkpointing": (
        {"training": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 0}}},
        "training.gradient_checkpointing_kwargs={'every_n_layers': 0} is not allowed",
    ),
    "checkpointing without an accelerator": (
        {"training": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}},
        "is not allowed (offload needs an accelerator)",
    ),
    "workers": (
        {"training": {"dataloader_persistent_workers": True}},
        "training.dataloader_persistent_workers=True needs dataloader_num_workers >= 1, got 0. Remedy: ",
    ),
    "optimizer of ours": ({"training": {"optimizer": "adagrad"}}, "training.optimizer='adagrad' is not allowed"),
    "precision": ({"training": {"bf16": True, "fp16": True}}, "training.bf16=True, training.fp16=True: At most one"),
    "report": ({"training": {"report_to": "wandb2"}}, "training.report_to='wandb2' cannot be used (wandb2 is not"),
    "one process": ({"training": {"fsdp": "full_shard"}}, "training.fsdp needs several processes"),
    "sharding": ({"training": {"deepspeed": "none.json"}}, "training.deepspeed='none.json': "),
    "accelerator": ({"training": {"accelerator_config": "none.json"}}, "training.accelerator_config='none.json': "),
    "accelerator field": (
        {"training": {"accelerator_config": {"x": 1}}},
        "got an unexpected keyword argument 'x'. Remedy: correct it, or leave it out.",
    ),
    "backend": ({"training": {"ddp_backend": "psychic"}}, "training.ddp_backend='psychic': "),
    "backend for one process": ({"training": {"ddp_backend": "gloo"}}, "training.ddp_backend='gloo': Default process"),
    "word beyond the vocabulary": (
        {"decoding": {"generate": {"forced_bos_token_id": 10**6}}},
        "decoding.generate={'forced_bos_token_id': 1000000} was rejected by transformers",
    ),
    "guidance": (
        {"decoding": {"generate": {"guidance_scale": 1.5}}},
        "decoding.generate={'guidance_scale': 1.5} fails",
    ),
    "compiler": ({"training": {"torch_compile_backend": "gcc"}}, "training.torch_compile_backend='gcc' is not allowed"),
    "compiler's mode": (
        {"training": {"torch_compile": True, "torch_compile_mode": "zeal"}},
        "training.torch_compile_mode='zeal' is not allowed; it must be one of default",
    ),
}


@pytest.mark.parametrize("case", BEFORE, ids=BEFORE)
def test_before_training(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").touch()
    (tmp_path / "HALF").mkdir()
    (tmp_path / "HALF/config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    sections, expected = BEFORE[case]
    base = {"model": {"preset": "tiny"}, "training": {"use_cpu": True, "max_steps": 2}}
    plan = Recipe(**{**base, **{name: {**base.get(name, {}), **value} for name, value in sections.items()}})
    environment = dict(os.environ)
    assert expected in message_of(train, plan, tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before
    # Later runs in this process have none of its settings.
    assert dict(os.environ) == environment
    logger.info("Something else.")
    Recipe(training={"use_cpu": True}).trainer_arguments(tmp_path)


def test_arguments_of_checkpointing_that_are_right(tmp_path):
    for given in ({"use_reentrant": False, "determinism_check": "none"}, {"preserve_rng_state": False}, {}, None):
        settings = {"use_cpu": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": given}
        plan = Recipe(model={"preset": "tiny"}, training=settings)
        arguments = plan.trainer_arguments(tmp_path)
        check_before_training(plan, arguments)


@pytest.mark.parametrize("name", [each.value for each in OptimizerNames])
def test_every_optimizer_of_transformers_trains_or_is_refused(tmp_path, name):
    """With what is installed here; none of them ends in a traceback."""
    plan = Recipe(model={"preset": "tiny", "fields": {"d_model": 16}}, training={"use_cpu": True, "optim": name})
    arguments = plan.trainer_arguments(tmp_path)
    try:
        check_before_training(plan, arguments)
    except UserError as error:
        assert str(error).startswith(f"training.optim={name} cannot be used (") and "Remedy: " in str(error)
        return
    kind, settings = TranslationTrainer.get_optimizer_cls_and_kwargs(arguments, None)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = kind([parameter], **settings)
    parameter.sum().backward()
    optimizer.step()
    assert parameter.isfinite().all() and (parameter != 1).all()


def test_what_is_not_installed_is_found_before_training(tmp_path):
    plan = Recipe(model={"preset": "tiny"}, training={"use_cpu": True, "report_to": ["wandb"]})
    callback = mock.Mock(side_effect=RuntimeError("WandbCallback requires wandb to be installed."))
    with mock.patch.dict("transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK", wandb=callback):
        message = message_of(train, plan, tmp_path / "run")
    assert "training.report_to='wandb' cannot be used (WandbCallback requires wandb to be installed)." in message
    assert not (tmp_path / "run").exists()


def test_what_a_run_does_not_do_may_be_said_to_be_off():
    training = {"predict_with_generate": False, "push_to_hub": False, "do_train": False, "generation_config": None}
    assert training.items() <= Recipe(training=training).training.to_dict().items()


def test_a_recipe_changed_after_it_was_made_is_checked_again(tmp_path):
    plan = Recipe(training={"use_cpu": True})
    plan.training.max_steps = 0
    assert "training.max_steps=0" in message_of(train, plan, tmp_path / "run")
    plan = Recipe(training={"use_cpu": True})
    plan.data.num_proc = 0
    assert "data.num_proc=0" in message_of(train, plan, tmp_path / "run")


def test_missing_files_stay_such_errors(tmp_path):
    plan = Recipe(data={"train": [{"tsv": "none.tsv"}]}, training={"use_cpu": True})
    arguments = plan.trainer_arguments(tmp_path)
    with pytest.raises(MissingFileError):
        check_before_training(plan, arguments)


def test_printing_checks_the_model_too(tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text("model: {preset: huge}\ndata: {train: [{tsv: not-yet.tsv}]}\n")
    assert main(["train", str(path), "--print-recipe"]) == 2
    assert "model.preset='huge' is not allowed" in capsys.readouterr().err
    assert main(["train", str(path), "--print-recipe", "model.preset=tiny", "decoding.generate={top_k: -1}"]) == 2
    assert "decoding.generate.top_k=-1 is not allowed" in capsys.readouterr().err
    assert main(["train", str(path), "--print-recipe", "model.preset=tiny"]) == 0
    assert recipe_yaml.load_yaml(capsys.readouterr().out, "it")["model"]["preset"] == "tiny"
