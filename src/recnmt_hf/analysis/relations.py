"""Relation scores of RNMT: how strongly each pair of source words acts on the state of the first one."""

from typing import Any

import numpy as np

from ..data.text import tsv
from ..inference.translator import Translator
from . import plots
from .sentences import cells, check_index, require, run_encoder


def relation_scores(translator: Translator, sentence: str, layer: int = 0) -> tuple[list[str], np.ndarray]:
    """
    Encode a sentence with an RNMT model. Return its tokens, and the lengths of the relation vectors r_ij (Zhang et al.,
    2018, Eq. 8) in a relation layer, of row i, whose state is refined, with column j. `UserError` if the model has no
    relation layers or no such layer, or the sentence is blank.
    """
    encoded, tokens = run_encoder(translator, sentence)
    scores = getattr(encoded, "relation_scores", None) or ()
    require(scores, translator, "relation layers (relation_layers=0)", "Pass an RNMT.")
    check_index("layer", layer, len(scores))
    return tokens, scores[layer][0].float().cpu().numpy()


def inspect_relations(translator: Translator, sentence: str, output: str | None = None, layer: int = 0) -> str:
    """Return the scores of a relation layer as a table, or plot them and return a summary."""
    tokens, scores = relation_scores(translator, sentence, layer)
    if output is None:
        rows = zip(tokens, scores, strict=True)
        return tsv([["token", *tokens], *([token, *cells(row)] for token, row in rows)])
    labels: dict[str, Any] = {"title": f"Strength of the relations between source tokens, relation layer {layer}"}
    labels |= {"column_name": "related token", "name": "length of the relation vector"}
    plots.heat_maps([("", scores)], tokens, tokens, "refined token", output, **labels)
    return f"{output}: relations of {len(tokens)} tokens\n"
