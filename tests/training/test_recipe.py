"""Recipes: reading, overriding, defaults; wrong ones raise an error with the field of the fault."""

import math
import os
from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import get_origin

import pytest
import yaml
from option_tables import option_table
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.data.corpora import Corpus
from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.options import members, options_of
from recnmt_hf.training import checkpoints, recipe_yaml, sections
from recnmt_hf.training.arguments import OWN_ARGUMENTS, TranslationTrainingArguments
from recnmt_hf.training.building import ModelSection
from recnmt_hf.training.guided_alignment import GuidedAlignment
from recnmt_hf.training.plan import Plan
from recnmt_hf.training.processes import logger
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


# Options by section.
OPTIONS = {
    "model": options_of(ModelSection),
    "data": options_of(sections.DataSection),
    "tokenizer": options_of(sections.TokenizerSection),
    "training": sections.TRAINING_OPTIONS,
    "decoding": options_of(DecodingOptions),
    "average": options_of(sections.AverageSection),
    "guided_alignment": options_of(GuidedAlignment),
}
# Lists and mappings that are parsed by their own rules.
PARSED = ("train", "validation", "fields", "generate")


def wrong_values(entry):
    """Values of another type than an option's, and beyond its range."""
    kinds = [get_origin(kind) or kind for kind in members(entry.value_type())]
    numbers = {int, float} & set(kinds)
    yield object()
    if bool not in kinds and not set(kinds) & {str, list, dict}:
        yield "nonsense"
        yield []
    if numbers:
        yield from (math.nan, math.inf, 2**70)
        if entry.allowed is not None:
            bounds = ((entry.allowed.least, -1), (entry.allowed.above, 0), (entry.allowed.most, 1))
            yield from (bound + step for bound, step in (*bounds, (entry.allowed.below, 0)) if bound is not None)
    if entry.choices is not None:
        yield "nonsense"


@pytest.mark.parametrize("section", OPTIONS)
def test_every_field_knows_its_type_and_range(section):
    for name, entry in OPTIONS[section].items():
        for value in wrong_values(entry) if name not in PARSED and name not in sections.NO_EFFECT else ():
            if (name, value) == ("max_steps", -1):
                continue  # epochs decide
            with rejects(field=f"{section}.{name}"):
                Recipe(**{section: {name: value}})
    with rejects(field=f"{section}.nonsense"):
        Recipe(**{section: {"nonsense": 1}})
    with rejects(field=section):
        Recipe(**{section: "nonsense"})


def test_fields_without_effect_are_refused():
    """They may be switched off."""
    for name in sections.NO_EFFECT:
        with rejects("has no effect", field=f"training.{name}"):
            Recipe(training={name: "something"})
    training = {"predict_with_generate": False, "push_to_hub": False, "do_train": False, "generation_config": None}
    assert training.items() <= Recipe(training=training).training.values.items()


# Content of a recipe, and field of its error: contradictions, places, and YAML.
TABLE = """
data: {target_lang: ../de}  |  data.target_lang
data: {train: []}  |  data.train
data: {train: [{tvs: a}]}  |  data.train[0].tvs
data: {train: [{tsv: a, jsonl: b}]}  |  data.train[0]
data: {train: [{source: a}]}  |  data.train[0].source
tokenizer: {target_kind: word}  |  tokenizer.joint
tokenizer: {target: b, joint: false}  |  tokenizer.target
training: {max_steps: -1}  |  training.max_steps
training: {baseline_steps: 0.5, max_steps: 1}  |  training.baseline_steps
{model: {type: biarn_transformer, init_from: a}, training: {baseline_steps: 5}}  |  training.baseline_steps
training: {metric_for_best_model: bleu, bleu_samples: 0}  |  training.metric_for_best_model
training: {eval_strategy: no, early_stopping_patience: 2}  |  training.early_stopping_patience
training: {keep_last: 2}  |  training.keep_last
guided_alignment: {weight: 0.5}  |  guided_alignment
data: {validation: [{source: a, target: b, alignments: c}]}  |  data.validation[0].alignments
{average: {which: best}, training: {eval_strategy: no}}  |  average.which
{average: {which: best}, training: {save_steps: 300, eval_steps: 200}}  |  training.save_steps
{average: {which: best, count: 4}, training: {keep_best: 3}}  |  training.keep_best
decoding: {split_sentences: never}  |  decoding.split_sentences
test: [{generated: test}]  |  test[0].sacrebleu
test: {a: []}  |  test.a
test: {../a: {generated: test}}  |  test
modle: {}  |  modle
just words  |  r.yaml
training: {seed: 1, seed: 2}  |  r.yaml
training: {seed: !!python/object/apply:os.system [ls]}  |  r.yaml
training: *nothing  |  r.yaml
training: {text_metric: rouge, metric_for_best_model: bleu}  |  training.metric_for_best_model
data: {train: [{tsv: a, source_trees: b}]}  |  data.train[0].source_trees
data: {train: [{source: a, target: b, alignments: c, source_tag: <x>}]}  |  data.train[0].source_tag
tokenizer: {tags: ["</s>"]}  |  tokenizer.tags[0]
tokenizer: {tags: [<x>, <x>]}  |  tokenizer.tags[1]
tokenizer: {tags: [<x>], source: x}  |  tokenizer.tags
{tokenizer: {tags: [<x>]}, model: {init_from: x}}  |  tokenizer.tags
tokenizer: {dropout: 0.1, kind: word}  |  tokenizer.dropout
{tokenizer: {dropout: 0.1}, data: {train: [{jsonl: a, tree_columns: true}]}}  |  tokenizer.dropout
test: {both: [{tsv: a, target_tag: <a>}, {tsv: a, target_tag: <b>}]}  |  test.both
"""
ROWS = [row.rsplit("  |  ", 1) for row in TABLE.strip().splitlines()]


@pytest.mark.parametrize(("content", "field"), ROWS, ids=[row[0] for row in ROWS])
def test_values(tmp_path, content, field):
    path = tmp_path / "r.yaml"
    path.write_text(f"{content}\n", encoding="utf-8")
    with rejects(field=str(tmp_path / field) if field.endswith(".yaml") else field) as caught:
        Recipe.from_file(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_overrides(tmp_path):
    """They may fill empty sections."""
    path = tmp_path / "r.yaml"
    path.write_text("model:\ntraining: {seed: 3}\ntest:\n")
    wrong = {"max_steps": None, "trainin.seed=1": "trainin", "training.seed.x=1": "seed"}
    for given, field in {**wrong, "training.seed=x": "training.seed"}.items():
        with rejects(field=field):
            Recipe.from_file(path, [given])
    given = ["model.preset=tiny", "model.fields.dropout=0.2", "model.init_from=null"]
    recipe = Recipe.from_file(path, [*given, "training.max_steps=5", "training.max_steps=1e3"])  # the last one counts
    assert recipe.model.fields == {"dropout": 0.2} and recipe.model.init_from is None
    assert recipe.training.max_steps == 1000 and isinstance(recipe.training.max_steps, int)


def test_files_without_a_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    for content, words in (
        (b"a: " + b"[" * 100_000, "nested too deeply"),
        (b"a: &a [*a]", "aliases"),
        (b"model: {}\ndata: {source_lang: \xe9}\n", "not UTF-8"),
        (bytes(range(128)), "invalid YAML"),
        (b"model: {}\n---\nmodel: {}\n", "line 2"),
        (b'model: {preset: "\\ud800"}', "model.preset"),
    ):
        path.write_bytes(content)
        with rejects(words):
            Recipe.from_file(path)


def test_words_and_numbers_of_yaml(tmp_path):
    """YAML 1.2: Norwegian is a language, 1:30 no number, 010 ten; what is saved is read back as it was."""
    path = tmp_path / "r.yaml"
    path.write_bytes(
        b"\xef\xbb\xbfdata: {source_lang: no, target_lang: on}\n"
        b"training: {max_steps: 010, eval_strategy: no, learning_rate: 5e-4, run_name: 1:30, warmup_steps: 0x10}\n"
        b"test: {2014: {tsv: 2024-01-01}, b: {tsv: '0o17', jsonl: null}, c: {tsv: yes}}\n"
    )
    recipe = Recipe.from_file(path)
    assert (recipe.data.source_lang, recipe.data.target_lang) == ("no", "on")
    training = recipe.training
    assert (training.max_steps, training.eval_strategy, training.learning_rate) == (10, "no", 5e-4)
    assert (training.run_name, training.warmup_steps) == ("1:30", 16)
    files = {name: corpus.tsv for name, (corpus,) in recipe.test.items()}
    assert files == {"2014": "2024-01-01", "b": "0o17", "c": "yes"}
    recipe.save(tmp_path / "again.yaml")
    assert Recipe.from_file(tmp_path / "again.yaml") == recipe
    texts = "no y off 1:30 0o17 0x1F 0b1 010 09 1_0 1e5 1.5 5. .5_ 1.e+5 -0 - ~ null true << = .inf 2024-01-01 ü"
    for text in ("", *texts.split()):
        assert recipe_yaml.load_yaml(recipe_yaml.dump_yaml({"a": text}), "it") == {"a": text}
        assert yaml.safe_load(recipe_yaml.dump_yaml({"a": text})) == {"a": text}


@pytest.mark.parametrize("line", ["m{}: &m{} {{<<: [{}]}}", "m{}: &m{} [{}]"], ids=["merged", "listed"])
def test_repeated_aliases_take_no_time(tmp_path, line):
    """Thirty levels of ten aliases would be 10**30 values."""
    path = tmp_path / "r.yaml"
    levels = [line.format(level, level, ", ".join([f"*m{level - 1}"] * 10)) for level in range(1, 30)]
    path.write_text("\n".join(["m0: &m0 {a: 1}", *levels]))
    with rejects("aliases that repeat more than 100,000 values", field=str(path)):
        recipe_yaml.read_yaml(path)
    assert checkpoints.mapping_in(path) == {}


def test_direction_of_a_metric(tmp_path):
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    for metric in ("loss", "eval_perplexity", "eval_dev_loss", "eval_bleu", "something"):
        found = TranslationTrainingArguments(**settings, metric_for_best_model=metric).greater_is_better
        assert found is (metric in ("eval_bleu", "something"))
        with rejects(field="greater_is_better") if metric != "something" else nullcontext():
            TranslationTrainingArguments(**settings, metric_for_best_model=metric, greater_is_better=not found)


def test_no_part_of_a_plan_is_a_section(tmp_path):
    """The run never sees a recipe. (Options of decoding and of guided alignment are frozen values.)"""
    kinds = (
        Recipe,
        sections.TrainingSection,
        *(type(getattr(Recipe(), name)) for name in ("model", "data", "tokenizer", "average")),
    )

    def parts(value):
        yield value
        inner = list(vars(value).values()) if is_dataclass(value) else []
        inner += [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, (list, tuple)) else []
        for one in inner:
            yield from parts(one)

    plan = Plan.of(
        Recipe(test={"one": {"generated": "test"}}, training={"baseline_steps": 2, "max_steps": 4}), tmp_path
    )
    assert not [one for one in parts(plan) if isinstance(one, kinds)]


# Changes to a small recipe that runs, and the field of their error, before anything is written.
BEFORE = {
    "preset": ({"model": {"preset": "huge"}}, "model.preset"),
    "field": ({"model": {"fields": {"d_modle": 3}}}, "model.fields.d_modle"),
    "heads": ({"model": {"fields": {"encoder_attention_heads": 7}}}, "model.fields.encoder_attention_heads"),
    "type": ({"model": {"type": "rnnmt"}}, "model.type"),
    "layers": ({"model": {"fields": {"encoder_layers": 10**9}}}, "model.fields.encoder_layers"),
    "wide": ({"model": {"preset": "big", "fields": {"d_model": 2**20, "encoder_layers": 900}}}, "model"),
    "positions": ({"model": {"fields": {"max_position_embeddings": 128}}}, "data.max_source_length"),
    "training file": ({"data": {"train": [{"source": "none.en", "target": "none.de"}]}}, None),
    "pairs": ({"data": {"train": [{"tsv": __file__}]}}, None),
    "languages": ({"data": {"source_lang": "fr"}}, None),
    "weights": ({"data": {"weights": [1.0]}}, "data.weights"),
    "one process": ({"training": {"fsdp": "full_shard"}}, "training.fsdp"),
    "workers": ({"training": {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2}}, None),
    "schedule": ({"training": {"lr_scheduler_type": "warmup_stable_decay"}}, "training"),
    "optimizer": ({"training": {"optim": "adamw_8bit"}}, "training"),
    "precision": ({"training": {"bf16": True, "fp16": True}}, None),
    "report": ({"training": {"report_to": "wandb2"}}, "training"),
}


@pytest.mark.parametrize("case", BEFORE, ids=BEFORE)
def test_before_training(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    changes, field = BEFORE[case]
    base = {"model": {"preset": "tiny"}, "training": {"use_cpu": True, "max_steps": 2}}
    recipe = Recipe(**{**base, **{name: {**base.get(name, {}), **value} for name, value in changes.items()}})
    environment = dict(os.environ)
    with rejects(field=field) if field else pytest.raises((ValueError, OSError)):
        train(recipe, tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before
    # Later runs in this process have none of its settings.
    assert dict(os.environ) == environment
    logger.info("Something else.")
    Plan.of(Recipe(training={"use_cpu": True}), tmp_path)


def test_recipe_and_plan_are_printed_without_training(tmp_path, capsys):
    """The recipe with a check of its model, the plan with one of its files too."""
    path = tmp_path / "r.yaml"
    path.write_text("model: {preset: huge}\ndata: {train: [{tsv: not-yet.tsv}]}\n")
    assert main(["train", str(path), "--print-recipe"]) == 2
    assert "is not allowed; it must be" in capsys.readouterr().err
    assert main(["train", str(path), "--print-recipe", "model.preset=tiny"]) == 0
    assert recipe_yaml.load_yaml(capsys.readouterr().out, "it")["model"]["preset"] == "tiny"
    path.write_text("model: {preset: tiny}\ntraining: {use_cpu: true, max_steps: 7}\n")
    assert main(["train", str(path), "--plan", "-o", str(tmp_path / "run")]) == 0
    plan = recipe_yaml.load_yaml(capsys.readouterr().out, "it")
    assert [stage["until"] for stage in plan["stages"]] == [7] and plan["identity"]["training.seed"] == 1
    assert not (tmp_path / "run").exists()
    assert main(["train", str(path), "--plan", "data.train=[{tsv: none.tsv}]"]) == 2


def test_a_recipe_extends_another(tmp_path):
    base = "model: {preset: tiny, fields: {dropout: 0.2}}\ntraining: {max_steps: 5, seed: 3}\n"
    (tmp_path / "base.yaml").write_text(f"{base}test: {{old: {{generated: test}}}}\n")
    (tmp_path / "sub").mkdir()
    changes = "model: {fields: {init_std: 0.1}}\ntest: {old: null, new: {generated: test_deep}}\n"
    (tmp_path / "sub/a.yaml").write_text(f"extends: ../base.yaml\n{changes}")
    (tmp_path / "sub/b.yaml").write_text("extends: a.yaml\ntraining: {max_steps: 7}\n")
    recipe = Recipe.from_file(tmp_path / "sub/b.yaml", ["training.seed=4"])
    assert recipe.model.preset == "tiny" and recipe.model.fields == {"dropout": 0.2, "init_std": 0.1}
    assert recipe.training.max_steps == 7 and recipe.training.seed == 4
    assert recipe.test == {"new": [Corpus(generated="test_deep")]}
    (tmp_path / "loop.yaml").write_text("extends: loop.yaml\n")
    with rejects(field=str(tmp_path / "loop.yaml")):
        Recipe.from_file(tmp_path / "loop.yaml")
    (tmp_path / "lost.yaml").write_text("extends: nothing.yaml\n")
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        Recipe.from_file(tmp_path / "lost.yaml")
    (tmp_path / "two.yaml").write_text("extends: [a.yaml, b.yaml]\n")
    with rejects(field="extends"):
        Recipe.from_file(tmp_path / "two.yaml")


@pytest.mark.parametrize("section", ["model", "data", "tokenizer", "average", "training", "decoding"])
def test_null_resets_any_field(tmp_path, section):
    """In a recipe that extends another and on the command line; unknown names are still rejected."""
    names = list(options_of(type(getattr(Recipe(), section)))) if section != "training" else sections.TRAINING_OPTIONS
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({section: dict.fromkeys(names, "no such value")}))
    (tmp_path / "plain.yaml").write_text("extends: base.yaml\n")
    path = tmp_path / "back.yaml"
    path.write_text(yaml.safe_dump({"extends": "base.yaml", section: dict.fromkeys(names)}))
    assert Recipe.from_file(path) == Recipe()
    assert Recipe.from_file(tmp_path / "base.yaml", [f"{section}.{name}=null" for name in names]) == Recipe()
    path.write_text(yaml.safe_dump({"extends": "base.yaml", section: None}))
    assert Recipe.from_file(path) == Recipe()
    path.write_text(yaml.safe_dump({"extends": "base.yaml", section: {**dict.fromkeys(names), "no_such_field": None}}))
    with rejects(field=f"{section}.no_such_field"):
        Recipe.from_file(path)


def test_null_is_a_value_within_a_field(tmp_path):
    """`rpe_type: null` is a plain Transformer, whatever the preset's."""
    (tmp_path / "base.yaml").write_text("model: {fields: {rpe_type: mpr_head, dropout: 0.2}}\n")
    path = tmp_path / "r.yaml"
    path.write_text("extends: base.yaml\nmodel: {fields: {rpe_type: null}}\n")
    assert Recipe.from_file(path).model.fields == {"rpe_type": None, "dropout": 0.2}
    assert Recipe.from_file(path, ["model.fields=null"]).model.fields == {}
    assert Recipe.from_file(path, ["model.fields.dropout=null"]).model.fields == {"rpe_type": None, "dropout": None}


def test_every_shipped_recipe_is_valid(repository):
    paths = sorted((repository / "scripts" / "recipes").glob("*.yaml"))
    assert paths
    for path in paths:
        recipe = Recipe.from_file(path)
        recipe.training.use_cpu = True
        Plan.of(recipe, repository / "outputs" / "none")


def test_every_accelerate_file_is_valid(repository):
    from accelerate.commands.config.config_args import load_config_from_file

    paths = sorted((repository / "scripts" / "accelerate").glob("*.yaml"))
    assert len(paths) >= 3
    for path in paths:
        stated = yaml.safe_load(path.read_text())["num_processes"]
        assert load_config_from_file(str(path)).num_processes == stated


def test_number_of_checkpoints_that_are_kept(tmp_path):
    for count, which, training, kept in (
        (5, "last", {}, (5, 1)),
        (1, "last", {}, (2, 1)),
        (8, "last", {}, (8, 1)),
        (1, "last", {"keep_last": 1}, (1, 1)),
        (3, "best", {}, (5, 3)),
        (1, "best", {"keep_best": 4}, (5, 4)),
    ):
        recipe = Recipe(average={"count": count, "which": which}, training={**training, "use_cpu": True})
        arguments = Plan.of(recipe, tmp_path).arguments
        assert (arguments.keep_last, arguments.keep_best) == kept


def test_epochs_decide_where_no_steps_are_given(tmp_path):
    recipe = Recipe(training={"num_train_epochs": 3})
    assert recipe.training.max_steps == -1
    with rejects("training.max_steps", field="training.num_train_epochs"):
        Recipe(training={"num_train_epochs": 3, "max_steps": 5})
    for given, override, expected in (
        ("max_steps: 5", "training.num_train_epochs=2", (-1, 2)),
        ("num_train_epochs: 3", "training.max_steps=7", (7, None)),
        ("num_train_epochs: 3", "training.max_steps=-1", (-1, 3)),
    ):
        (tmp_path / "recipe.yaml").write_text(f"training: {{{given}}}\n")
        values = Recipe.from_file(tmp_path / "recipe.yaml", [override]).training.values
        assert (values["max_steps"], values.get("num_train_epochs")) == expected


TABLES = {
    "model": option_table(ModelSection),
    "data": option_table(sections.DataSection),
    "corpus": option_table(Corpus),
    "tokenizer": option_table(sections.TokenizerSection),
    "average": option_table(sections.AverageSection),
    "guided_alignment": option_table(GuidedAlignment),
    "training": option_table(sections.RunSection),
    "arguments": option_table(TranslationTrainingArguments, OWN_ARGUMENTS),
    "defaults": "\n".join(f"| `{name}` | `{value}` |" for name, value in sections.TRAINING_DEFAULTS.items()),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_documentation_has_the_tables_of_the_fields(repository, name):
    text = (repository / "scripts/recipes/README.md").read_text(encoding="utf-8")
    assert TABLES[name] in text, f"scripts/recipes/README.md should have this table:\n{TABLES[name]}"
