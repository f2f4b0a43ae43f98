"""Wrong recipes: each raises an error with the code and field of the fault, and nothing is written."""

import math
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from transformers.training_args import OptimizerNames
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.errors import MissingFileError, UserError
from recnmt_hf.training import output_folder, recipe_yaml
from recnmt_hf.training.arguments import TranslationTrainingArguments
from recnmt_hf.training.checks import check_before_training, check_libraries, check_model
from recnmt_hf.training.metrics import higher_is_better
from recnmt_hf.training.processes import logger
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train
from recnmt_hf.training.trainer import TranslationTrainer


# Content of a recipe, and code and field of its error.
TABLE = (Path(__file__).parent / "bad_recipes.txt").read_text(encoding="utf-8").splitlines()
ROWS = [row.rsplit("  |  ", 2) for row in TABLE if not row.startswith("# ")]


@pytest.mark.parametrize("content, code, field", ROWS, ids=[row[0] for row in ROWS])
def test_values(tmp_path, content, code, field):
    path = tmp_path / "r.yaml"
    path.write_text(f"{content}\n", encoding="utf-8")
    is_file = field.endswith(".yaml") or field == "/etc"
    with rejects(code, field=str(tmp_path / field) if is_file else field) as caught:
        Recipe.from_file(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


# Overrides on the command line, and code and field of their error.
OVERRIDES = {
    "max_steps": ("Write section.field=value", None),
    "=5": ("Write section.field=value", None),
    "training.=5": ("Write section.field=value", None),
    ".seed=5": ("Write section.field=value", None),
    "training..seed=5": ("Write section.field=value", None),
    "training.seed =5": ("Write section.field=value", None),
    "training.seed=": ("=null for its default, or", "training.seed"),
    "model.fields.x=": ("=null for its default, or", "model.fields.x"),
    "model.fields.x= ": ("=null for its default, or", "model.fields.x"),
    "trainin.seed=1": ("There is no field", "trainin"),
    "extends=a.yaml": ("There is no field", "extends"),
    "seed=1": ("There is no field", "seed"),
    "training.seed.x=1": ("cannot be set, because", "training.seed.x"),
    "data.train.0.size=1": ("cannot be set, because", "data.train.0.size"),
    "model.preset.x.y=1": ("cannot be set, because", "model.preset.x.y"),
    "training.seed=[": ("invalid YAML", "training.seed"),
    "training.seed={a: 1, a: 2}": ("invalid YAML", "training.seed"),
    "training=5": ("must be a mapping of names to values,", "training"),
    "training.seed=x": ("is not allowed; it must be", "training.seed"),
}


@pytest.mark.parametrize("given", OVERRIDES, ids=OVERRIDES)
def test_overrides(tmp_path, given):
    path = tmp_path / "r.yaml"
    path.write_text("model: {preset: tiny}\ndata: {train: [{generated: train}]}\ntraining: {seed: 3}\n")
    with rejects(OVERRIDES[given][0], field=OVERRIDES[given][1]):
        Recipe.from_file(path, [given])


def test_overrides_may_fill_empty_sections(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model:\ntraining: {}\ntest:\n")
    given = ["model.preset=tiny", "model.fields.dropout=0.2", "model.init_from=null"]
    given += ["training.max_steps=5", "training.max_steps=1e3"]  # the last one counts
    recipe = Recipe.from_file(path, given)
    assert recipe.model.fields == {"dropout": 0.2} and recipe.model.init_from is None
    assert recipe.training.max_steps == 1000 and isinstance(recipe.training.max_steps, int)


# Files without a recipe, and code and details of their error.
FILES = {
    "deep": (b"a: " + b"[" * 100_000, "invalid YAML", {"reason": "nested too deeply"}),
    "alias in its anchor": (b"a: &a [*a]", "invalid YAML", {"reason": "an alias within its own anchor"}),
    "latin-1": (b"model: {}\ndata: {source_lang: \xe9}\n", "not UTF-8", {"line": 2}),
    "utf-16": ("model: {}".encode("utf-16"), "not UTF-8", {"line": 1}),
    "binary": (bytes(range(128)), "invalid YAML", {"position": ", line 1"}),
    "second document": (b"model: {}\n---\nmodel: {}\n", "invalid YAML", {"position": ", line 2, column 1"}),
    "tabs": (b"model:\n\tpreset: tiny\n", "invalid YAML", {"position": ", line 2, column 1"}),
}


@pytest.mark.parametrize("case", FILES, ids=FILES)
def test_files(tmp_path, case):
    content, code, details = FILES[case]
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with rejects(code, *details.values(), field=str(path)):
        Recipe.from_file(path)


def test_text_that_no_file_can_hold(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b'model: {preset: "\\ud800"}')
    with rejects(field="model.preset"):
        Recipe.from_file(path)


def test_places_without_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("{}")
    for path, code in {
        tmp_path: "is a folder",
        "/dev/zero": "more than",
        tmp_path / "b.yaml": "does not exist",
        tmp_path / "a.yaml" / "b.yaml": "cannot be read",
        tmp_path / ("x" * 5000): "cannot be read",
        "a\0b": "cannot be read",
    }.items():
        with rejects(code) as caught:
            Recipe.from_file(path)
        if code == "does not exist":
            assert "a.yaml" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("{}")
    path.chmod(0)
    with rejects(field=str(path)):
        Recipe.from_file(path)


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


@pytest.mark.parametrize("line", ["m{}: &m{} {{<<: [{}]}}", "m{}: &m{} [{}]"], ids=["merged", "listed"])
def test_repeated_aliases_take_no_time(tmp_path, line):
    """Thirty levels of ten aliases would be 10**30 values."""
    path = tmp_path / "r.yaml"
    levels = [line.format(level, level, ", ".join([f"*m{level - 1}"] * 10)) for level in range(1, 30)]
    path.write_text("\n".join(["m0: &m0 {a: 1}", *levels]))
    if "<<" in line:
        assert recipe_yaml.read_yaml(path)["m29"] == {"a": 1}
    else:
        with rejects("aliases that repeat more than 100,000 values", field=str(path)):
            recipe_yaml.read_yaml(path)
    assert output_folder.mapping_in(path) == ({} if "<<" not in line else recipe_yaml.read_yaml(path))


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
        with rejects(field="greater_is_better"):
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
    with rejects(field=name):
        TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


# -- before training ---------------------------------------------------------------------------------------------------

# Changes to a small recipe that runs, and code and field of their error, before anything is written.
BEFORE = {
    "preset": ({"model": {"preset": "huge"}}, "is not allowed; it must be", "model.preset"),
    "field": ({"model": {"fields": {"d_modle": 3}}}, "There is no field", "model.fields.d_modle"),
    "value": ({"model": {"fields": {"d_model": "wide"}}}, "is not allowed; it must be", "model.fields.d_model"),
    "heads": (
        {"model": {"fields": {"encoder_attention_heads": 7}}},
        "is not allowed with",
        "model.fields.encoder_attention_heads",
    ),
    "field of another": (
        {"model": {"type": "rnmt", "fields": {"recurrence_steps": 3}}},
        "There is no field",
        "model.fields.recurrence_steps",
    ),
    "null": (
        {"model": {"fields": {"encoder_layers": None}}},
        "is not allowed; it must be",
        "model.fields.encoder_layers",
    ),
    "wide": (
        {"model": {"preset": "big", "fields": {"d_model": 2**20, "encoder_layers": 900}}},
        "Use a smaller preset, or lower the",
        "model",
    ),
    "many": (
        {"model": {"preset": "big", "fields": {"encoder_ffn_dim": 2**20, "encoder_layers": 900}}},
        "Use a smaller preset, or lower the",
        "model",
    ),
    "symbols": (
        {"model": {"fields": {"d_model": 16384}}, "tokenizer": {"vocab_size": 10**7}},
        "Use a smaller preset, or lower the",
        "model",
    ),
    "positions": (
        {"model": {"fields": {"max_position_embeddings": 128}}},
        "exceeds the model's",
        "data.max_source_length",
    ),
    "no baseline": ({"model": {"init_from": "./none/model"}}, "is missing", "model.init_from"),
    "half a baseline": ({"model": {"init_from": "HALF"}}, "is missing", "model.init_from"),
    "no tokenizer": ({"tokenizer": {"source": "./none"}}, "is missing", "tokenizer.source"),
    "training file": (
        {"data": {"train": [{"source": "none.en", "target": "none.de"}]}},
        "does not exist",
        "data.train[0]: none.en",
    ),
    "validation file": (
        {"data": {"validation": [{"tsv": "none.tsv"}]}},
        "does not exist",
        "data.validation[0]: none.tsv",
    ),
    "test file": ({"test": {"a": {"jsonl": "none.jsonl"}}}, "does not exist", "test.a: none.jsonl"),
    "second test file": (
        {"test": {"a": [{"generated": "test"}, {"tsv": "x.tsv"}]}},
        "does not exist",
        "test.a[1]: x.tsv",
    ),
    "folder": ({"test": {"a": {"tsv": "."}}}, "is a folder", "test.a: ."),
    "empty file": ({"test": {"a": {"tsv": "EMPTY"}}}, "is empty", "test.a: EMPTY"),
    "dataset folder": ({"test": {"a": {"dataset": "./none"}}}, "does not exist", "test.a: ./none"),
    "languages": ({"data": {"source_lang": "fr"}}, "Set source_lang: en and target_lang:", "data.train[0]"),
    "cache": ({"data": {"cache_dir": "EMPTY"}}, "cannot be written", "EMPTY"),
    "cache that nobody can write": ({"data": {"cache_dir": "/proc/x"}}, "cannot be written", "/proc/x"),
    "word beyond the vocabulary": (
        {"decoding": {"generate": {"forced_bos_token_id": 10**6}}},
        "was rejected by",
        "decoding.generate",
    ),
    "workers": (
        {"training": {"dataloader_persistent_workers": True}},
        "requires",
        "training.dataloader_persistent_workers",
    ),
    "one process": ({"training": {"fsdp": "full_shard"}}, "requires", "training.fsdp"),
    "guidance": ({"decoding": {"generate": {"guidance_scale": 1.5}}}, "was rejected by", "decoding.generate"),
    "compiler": (
        {"training": {"torch_compile_backend": "gcc"}},
        "is not allowed; it must be",
        "training.torch_compile_backend",
    ),
    "compiler's mode": (
        {"training": {"torch_compile": True, "torch_compile_mode": "zeal"}},
        "is not allowed; it must be",
        "training.torch_compile_mode",
    ),
}
# Arguments of training that a library rejects; the first one is the field of the error, unless there is another.
REJECTED = {
    "schedule": ({"lr_scheduler_type": "warmup_stable_decay"}, None),
    "schedule kwargs": ({"lr_scheduler_kwargs": {"spin": 1}}, "lr_scheduler_type"),
    "optimizer": ({"optim": "adamw_8bit"}, None),
    "optimizer's arguments": ({"optim": "sgd", "optim_args": "momentum"}, None),
    "optimizer of modules": ({"optim": "galore_adamw", "optim_target_modules": "all-linear"}, None),
    "checkpointing": (
        {"gradient_checkpointing_kwargs": {"reentrant": False}, "gradient_checkpointing": True},
        None,
    ),
    "layers of checkpointing": (
        {"gradient_checkpointing_kwargs": {"every_n_layers": 0}, "gradient_checkpointing": True},
        None,
    ),
    "checkpointing without an accelerator": (
        {"gradient_checkpointing_kwargs": {"offload": True}, "gradient_checkpointing": True},
        None,
    ),
    "precision": ({"bf16": True, "fp16": True}, "bf16, training.fp16"),
    "report": ({"report_to": "wandb2"}, None),
    "sharding": ({"deepspeed": "none.json"}, None),
    "accelerator": ({"accelerator_config": "none.json"}, None),
    "accelerator field": ({"accelerator_config": {"x": 1}}, None),
    "backend": ({"ddp_backend": "psychic"}, None),
    "backend for one process": ({"ddp_backend": "gloo"}, None),
}
BEFORE |= {
    name: ({"training": settings}, "cannot be used", f"training.{field or next(iter(settings))}")
    for name, (settings, field) in REJECTED.items()
}


@pytest.mark.parametrize("case", BEFORE, ids=BEFORE)
def test_before_training(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").touch()
    (tmp_path / "HALF").mkdir()
    (tmp_path / "HALF/config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    sections, code, field = BEFORE[case]
    base = {"model": {"preset": "tiny"}, "training": {"use_cpu": True, "max_steps": 2}}
    plan = Recipe(**{**base, **{name: {**base.get(name, {}), **value} for name, value in sections.items()}})
    environment = dict(os.environ)
    with rejects(code, field=field) as caught:
        train(plan, tmp_path / "run")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
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


@pytest.fixture(scope="module")
def meta_model():
    return check_model(Recipe(model={"preset": "tiny", "fields": {"d_model": 16}}, training={"use_cpu": True}))


@pytest.mark.parametrize("name", [name.value for name in OptimizerNames])
def test_every_optimizer_of_transformers_trains_or_is_rejected(tmp_path, meta_model, name):
    """With the installed packages; none of them ends in a traceback."""
    arguments = Recipe(training={"use_cpu": True, "optim": name}).trainer_arguments(tmp_path)
    try:
        check_libraries(arguments, meta_model)
    except UserError as error:
        assert error.field == "training.optim"
        return
    kind, settings = TranslationTrainer.get_optimizer_cls_and_kwargs(arguments, None)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = kind([parameter], **settings)
    parameter.sum().backward()
    optimizer.step()
    assert parameter.isfinite().all() and (parameter != 1).all()


def test_missing_packages_are_reported_before_training(tmp_path):
    plan = Recipe(model={"preset": "tiny"}, training={"use_cpu": True, "report_to": ["wandb"]})
    callback = mock.Mock(side_effect=RuntimeError("WandbCallback requires wandb to be installed."))
    known = "transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK"
    with mock.patch.dict(known, wandb=callback), rejects(field="training.report_to"):
        train(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fields_without_effect_may_be_switched_off():
    training = {"predict_with_generate": False, "push_to_hub": False, "do_train": False, "generation_config": None}
    training |= {"load_best_model_at_end": False}
    assert training.items() <= Recipe(training=training).training.to_dict().items()


def test_a_recipe_changed_after_it_was_made_is_checked_again(tmp_path):
    plan = Recipe(training={"use_cpu": True})
    plan.training.max_steps = 0
    with rejects(field="training.max_steps"):
        train(plan, tmp_path / "run")
    plan = Recipe(training={"use_cpu": True})
    plan.data.num_proc = 0
    with rejects(field="data.num_proc"):
        train(plan, tmp_path / "run")


def test_missing_files_raise_file_not_found_errors(tmp_path):
    plan = Recipe(data={"train": [{"tsv": "none.tsv"}]}, training={"use_cpu": True})
    arguments = plan.trainer_arguments(tmp_path)
    with pytest.raises(MissingFileError):
        check_before_training(plan, arguments)


def test_printing_checks_the_model_too(tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text("model: {preset: huge}\ndata: {train: [{tsv: not-yet.tsv}]}\n")
    assert main(["train", str(path), "--print-recipe"]) == 2
    assert "is not allowed; it must be" in capsys.readouterr().err
    assert main(["train", str(path), "--print-recipe", "model.preset=tiny", "decoding.generate={top_k: -1}"]) == 2
    assert "decoding.generate.top_k=-1" in capsys.readouterr().err
    assert main(["train", str(path), "--print-recipe", "model.preset=tiny"]) == 0
    assert recipe_yaml.load_yaml(capsys.readouterr().out, "it")["model"]["preset"] == "tiny"
