"""Tables of the hand-written cards: those of their files, and those of the papers."""

import json
import re

import card_tables
from pictures import check_pictures


def test_cards_have_the_tables_of_their_files(repository):
    """`python scripts/card_tables.py` changes nothing, and each file has a table or a link."""
    named = set()
    for card in sorted((repository / "model_cards").glob("*.md")):
        text = card.read_text(encoding="utf-8")
        assert card_tables.with_tables(card) == text, card.name
        named |= set(re.findall(r"<!-- evidence: (\w+) -->|\(evidence/(\w+)\.json\)", text))
    files = {path.stem for path in (repository / "model_cards/evidence").glob("*.json")}
    assert {one or other for one, other in named} == files


def test_pictures_are_those_of_their_files(repository, tmp_path):
    """`python scripts/card_tables.py` changes no picture either."""
    folder = repository / "model_cards/evidence"
    card_tables.draw_pictures(folder, tmp_path)
    check_pictures(tmp_path, folder)


def test_tables_of_sweeps_and_of_rows(tmp_path):
    run = {"seed": 1, "parameters": 1_690_000, "steps": 5, "validation": {"loss": 2.3333}, "p_values": {}}
    second = {**run, "p_values": {"set": 0.001}, "scores": {"set": {"bleu": 31.0}}, "values": {"row": "b | c"}}
    results = [{**run, "values": {"row": "a"}, "scores": {"set": {"bleu": 30.4321}}}, second]
    (tmp_path / "sweep.json").write_text(json.dumps(results))
    assert card_tables.table_of(tmp_path / "sweep.json").splitlines()[2:] == [
        "| a | 1.69M | 2.333 | 30.43 |  |",
        "| b / c | 1.69M | 2.333 | 31.00 | < .01 |",
    ]
    (tmp_path / "rows.json").write_text('[["x", "y"], [1, "2"]]')
    assert card_tables.table_of(tmp_path / "rows.json") == "| x | y |\n|---|---|\n| 1 | 2 |"
