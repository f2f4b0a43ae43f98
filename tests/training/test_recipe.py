"""Recipes: reading, overriding, checking; all shipped recipes are valid."""

import pytest
import yaml
from option_tables import option_table
from user_errors import rejects

from recnmt_hf.data.corpora import Corpus
from recnmt_hf.options import options_of
from recnmt_hf.training import recipe as recipes
from recnmt_hf.training import sections
from recnmt_hf.training.arguments import OWN_ARGUMENTS, TranslationTrainingArguments
from recnmt_hf.training.plan import Plan
from recnmt_hf.training.recipe import Recipe


def test_defaults_are_the_generated_corpus():
    recipe = Recipe()
    assert recipe.data.train == [Corpus(generated="train")] and recipe.model.type == "nmt_transformer"
    assert recipe.training.adam_beta2 == 0.98 and recipe.training.lr_scheduler_type == "inverse_sqrt"
    assert Recipe(data={"train": {"generated": "train"}}).data.train == [Corpus(generated="train")]


def test_a_recipe_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "model: {preset: tiny, fields: {dropout: 0.2}}\ntraining: {max_steps: 5, seed: 3}\n"
        "test: {old: {generated: test}}\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.yaml").write_text(
        "extends: ../base.yaml\nmodel: {fields: {init_std: 0.1}}\ntest: {old: null, new: {generated: test_deep}}\n"
    )
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
    names = list(options_of(type(getattr(Recipe(), section)))) if section != "training" else recipes.TRAINING_OPTIONS
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
        config = load_config_from_file(str(path))
        assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]


@pytest.mark.parametrize(
    ("average", "training", "kept"),
    [
        ({}, {}, (5, 1)),
        ({"count": 1}, {}, (2, 1)),
        ({"count": 8}, {}, (8, 1)),
        ({"count": 1}, {"keep_last": 1}, (1, 1)),
        ({"count": 3, "which": "best"}, {}, (5, 3)),
        ({"count": 1, "which": "best"}, {"keep_best": 4}, (5, 4)),
    ],
)
def test_number_of_checkpoints_that_are_kept(tmp_path, average, training, kept):
    arguments = Plan.of(Recipe(average=average, training={**training, "use_cpu": True}), tmp_path).arguments
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
    "model": option_table(recipes.ModelSection),
    "data": option_table(sections.DataSection),
    "corpus": option_table(Corpus),
    "tokenizer": option_table(sections.TokenizerSection),
    "average": option_table(sections.AverageSection),
    "guided_alignment": option_table(recipes.GuidedAlignment),
    "training": option_table(sections.RunSection),
    "arguments": option_table(TranslationTrainingArguments, OWN_ARGUMENTS),
    "defaults": "\n".join(
        ["| field | default |", "|---|---|", *(f"| `{n}` | `{v}` |" for n, v in recipes.TRAINING_DEFAULTS.items())]
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_documentation_has_the_tables_of_the_fields(repository, name):
    text = (repository / "scripts/recipes/README.md").read_text(encoding="utf-8")
    assert TABLES[name] in text, f"scripts/recipes/README.md should have this table:\n{TABLES[name]}"
