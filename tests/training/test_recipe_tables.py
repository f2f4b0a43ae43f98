"""The documentation of recipes has the tables of their fields."""

import pytest
from option_tables import option_table

from recnmt_hf.data.corpora import Corpus
from recnmt_hf.training import recipe
from recnmt_hf.training.arguments import OWN_ARGUMENTS, TranslationTrainingArguments


TABLES = {
    "model": option_table(recipe.ModelSection),
    "data": option_table(recipe.DataSection),
    "corpus": option_table(Corpus),
    "tokenizer": option_table(recipe.TokenizerSection),
    "average": option_table(recipe.AverageSection),
    "guided_alignment": option_table(recipe.GuidedAlignment),
    "training": option_table(recipe.RunSection),
    "arguments": option_table(TranslationTrainingArguments, OWN_ARGUMENTS),
    "defaults": "\n".join(
        ["| field | default |", "|---|---|", *(f"| `{n}` | `{v}` |" for n, v in recipe.TRAINING_DEFAULTS.items())]
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_fields(repository, name):
    text = (repository / "scripts/recipes/README.md").read_text(encoding="utf-8")
    assert TABLES[name] in text, f"scripts/recipes/README.md should have this table:\n{TABLES[name]}"
