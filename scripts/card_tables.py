#!/usr/bin/env python
"""Write the tables of model_cards/*.md from model_cards/evidence."""

from pathlib import Path

from recnmt_hf.data.files import locked_file, open_output
from recnmt_hf.hub.card_tables import with_tables


for card in sorted((Path(__file__).resolve().parents[1] / "model_cards").glob("*.md")):
    with locked_file(card), open_output(card) as file:
        file.write(with_tables(card))
