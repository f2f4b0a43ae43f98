"""The papers' figures: row files have the rows of the tables; programs and cards print them beside measured ones."""

import pytest
from parameters import count_rows, main
from sweep import CellResult, cells_of, paper_table_of, read_rows, table_of, with_size
from user_errors import rejects

from recnmt_hf.families import FAMILIES
from recnmt_hf.training.plan import Plan, model_on_meta
from recnmt_hf.training.recipe import Recipe


# Row file -> family, recipe, names of the tables that it repeats
ROW_FILES = {
    "biarn_table_1": ("biarn_transformer", "multi30k_en_de_small_biarn", ["table 1"]),
    "biarn_table_2": ("biarn_transformer", "multi30k_en_de_small_biarn", ["table 2"]),
    "biarn_table_4": ("biarn_transformer", "multi30k_en_de_small_biarn", ["table 4", "table 3"]),
    "biarn_figure_5": ("biarn_transformer", "multi30k_en_de_small_biarn", ["figure 5"]),
    "biarn_negative_results": ("biarn_transformer", "multi30k_en_de_small_biarn", []),
    "multi30k_4096": ("rnmt", "multi30k_en_de_small_rnmt", []),
    "gcn_multi30k": ("gcn_rnmt", "multi30k_en_de_small_gcn", []),
    "gret_table_3": ("gret", "multi30k_en_de_small_gret", ["table 3"]),
    "onlstm_tables_1_2": ("onlstm_transformer", "multi30k_en_de_small_onlstm", ["tables 1 and 2", "table 1"]),
    "rnmt_tables_1_to_3": ("rnmt", "multi30k_en_de_small_rnmt", ["table 1", "table 2"]),
    "rnmt_deen_mix": ("rnmt", "deen_mix_base_rnmt", []),
    "deen_mix_table": ("nmt_transformer", "deen_mix_small_table", []),
    "zh_en_mix": ("nmt_transformer", "zh_en_mix_small", []),
    "vrnmt_ablations": ("vrnmt", "btec_zh_en_small_rnmt", []),
    "rpe_table_1": ("rpe_transformer", "multi30k_en_de_small_rpe", ["table 1", "table 2"]),
    "rpe_table_3": ("rpe_transformer", "multi30k_en_de_small_rpe", ["table 3"]),
    "classical_table": ("nmt_transformer", "classical_table", []),
    "multi30k_table": ("nmt_transformer", "multi30k_en_de_small_table", []),
}
# Files whose rows have the size of their recipe
OF_ONE_SIZE = {"multi30k_table", "deen_mix_table", "zh_en_mix", "classical_table"}


@pytest.fixture(scope="module")
def recipes(repository):
    return repository / "scripts/recipes"


def test_every_row_file_is_known(recipes):
    files = {path.stem for path in (recipes / "rows").glob("*.yaml")}
    # Those of `scripts/results.py` say where the papers' figures for the rows of another file are.
    assert {name for name in files if name.removesuffix("_papers") not in files - {name}} == set(ROW_FILES)


@pytest.mark.parametrize("name", ROW_FILES)
def test_rows_are_those_of_the_tables_and_can_be_built(name, recipes):
    family, recipe, tables = ROW_FILES[name]
    path = recipes / f"rows/{name}.yaml"
    rows = read_rows(path)
    for table in FAMILIES[family].tables:
        if table.name in tables:
            assert {row.system for row in table.rows} <= set(rows), table.name
    if tables:
        assert paper_table_of(list(rows)).name == tables[0]
    shared = Recipe.from_file(recipes / f"{recipe}.yaml")
    sizes = [None] if name in OF_ONE_SIZE else ["tiny", "base"]
    for size in sizes:
        for cell in cells_of(with_size(rows, size, recipes / f"{recipe}.yaml"), [], []):
            built = Recipe.from_file(recipes / f"{recipe}.yaml", cell.overrides)
            model_on_meta(Plan.of(built))
            if built.model.type == shared.model.type:  # `model.fields` as a mapping would replace the recipe's fields
                assert shared.model.fields.keys() <= built.model.fields.keys(), cell.name


def test_rows_fit_every_recipe_of_their_family(recipes):
    types = {path: Recipe.from_file(path).model.type for path in recipes.glob("*.yaml")}
    for name, (family, own, _) in ROW_FILES.items():
        for path in (path for path in types if types[path] == types[recipes / f"{own}.yaml"] == family):
            if name not in OF_ONE_SIZE and "rnnsearch" not in path.name:  # recipes of single rows
                rows = with_size(read_rows(recipes / f"rows/{name}.yaml"), None, path)
                for cell in cells_of(rows, [], []):
                    model_on_meta(Plan.of(Recipe.from_file(path, cell.overrides)))


def test_size_of_rows(tmp_path, recipes):
    rows = {"a": ['model.preset="{size}_lstm"'], "b": ["model.fields.dropout=0"], "c": ['model.preset="zh_en"']}
    recipe = recipes / "multi30k_en_de_small_onlstm.yaml"
    assert with_size(rows, "base", recipe) == {
        "a": ['model.preset="base_lstm"'],
        "b": ["model.preset=base", "model.fields.dropout=0"],
        "c": ['model.preset="zh_en"'],
    }
    assert with_size(rows, None, recipe)["a"] == ['model.preset="small_lstm"']
    assert with_size(rows, None, recipe)["b"] == ["model.fields.dropout=0"]
    assert with_size(rows, None, recipe, ["model.preset=big_hybrid"])["a"] == ['model.preset="big_lstm"']
    assert paper_table_of([]) is None


@pytest.mark.parametrize(
    ("name", "model", "vocabulary", "size", "far"),
    [
        ("biarn_table_1", "biarn_transformer", 32000, "base", {}),
        ("rpe_table_1", "rpe_transformer", 32000, "base", {"RPEHead": 0.08}),
        # Sizes that contradict the other rows of the table
        ("onlstm_tables_1_2", "onlstm_transformer", 28561, "base", {"lstm and attention": 6.1, "more lstm": 4.8}),
        ("onlstm_tables_1_2", "onlstm_transformer", 28561, "big", {}),
    ],
)
def test_parameters_beside_the_papers(name, model, vocabulary, size, far, recipes):
    """The increase over the first row is that of the paper, to the digits printed."""
    titles, *rows = count_rows(str(recipes / f"rows/{name}.yaml"), model, size, vocabulary)
    assert titles[3:] == ["difference", "paper: parameters", "paper: difference"]
    compared = 0
    for row in rows[1:]:
        if row[5]:
            ours, theirs = (float(cell.removesuffix("M")) for cell in (row[3], row[5]))
            assert abs(ours - theirs) <= far.get(row[0], 0.5 if "onlstm" in name else 0.07), row
            compared += 1
    assert compared >= 1


def test_models_are_compared(capsys):
    main(["biarn_transformer", "nmt_transformer", "--size", "base", "big"])
    out = capsys.readouterr().out
    assert "base nmt_transformer: 44.14M without embeddings" in out
    assert "big nmt_transformer: 176.36M without embeddings" in out
    assert "base biarn_transformer against nmt_transformer: +9.46M" in out
    assert "big biarn_transformer against nmt_transformer: +69.26M" in out
    assert "+1,050,624  decoder.layers.recurrence_attn" in out
    main(["rnmt", "rnmt:relation_layers=0", "--size", "en_de"])
    assert "4.28M" in capsys.readouterr().out
    main(["vrnmt", "rnmt:relation_layers=0", "--size", "zh_en"])
    assert "3.94M" in capsys.readouterr().out


def test_the_program_prints_rows(capsys, recipes):
    path = str(recipes / "rows/rpe_table_1.yaml")
    main(["rpe_transformer", "--rows", path, "--size", "tiny"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny" and lines[1].startswith("row\twithout embeddings") and len(lines) == 9
    assert lines[-1].endswith("\t\t")  # the paper has no such size


def test_rows_may_reset_fields_and_name_only_mappings(tmp_path):
    path = tmp_path / "rows.yaml"
    path.write_text("a: {model.fields: null, model.type: null}\nb: {model: {preset: null, fields: {d_model: 32}}}\n")
    _, first, second = count_rows(str(path), "nmt_transformer:encoder_layers=1", "tiny", 100)
    assert first[3] == "+0.00M" and float(second[3].removesuffix("M")) < 0
    path.write_text("a: {model.fields: 3}\n")
    with rejects(field="model.fields"):
        count_rows(str(path), "nmt_transformer", "tiny", 100)


def test_a_sweep_has_the_papers_differences():
    scores = {"MPRHead": 31.5, "Transformer": 30.0, "new": 30.25}
    results = [
        CellResult(f"{name},{seed}", {"row": name}, seed, 10, 5, {}, {"one": {"bleu": scores[name] + seed}}, base)
        for name in ("Transformer", "MPRHead", "new")
        for seed in (1, 2)
        for base in [f"Transformer,{seed}"]
    ]
    titles, *rows = table_of(results)
    assert titles[-3:] == ["difference", "table 1: newstest2014", "table 1: difference"]
    assert [row[-3:] for row in rows] == [
        *[["", "27.25", ""]] * 2,
        *[["+1.50", "28.35", "+1.10"]] * 2,
        *[["+0.25", "", ""]] * 2,
    ]
    without_one = table_of(results[1:])  # the baseline of seed 1 failed
    assert [row[-3] for row in without_one[1:]] == ["", "", "+1.50", "", "+0.25"]
    results = [CellResult(name, {"row": name}, None, 10, 5) for name in ("Transformer", "a", "b")]
    assert table_of(results)[0] == ["row", "parameters", "steps"]
