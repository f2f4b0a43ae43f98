"""Relation scores of RNMT: how strongly each pair of source words acts on the state of the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.text import tsv
from ..errors import UserError, short_repr
from ..inference.translator import Translator
from .sentences import check_index, run_encoder


@dataclass
class RelationScores:
    """The lengths of the relation vectors r_ij (Zhang et al., 2018, Eq. 8) in a relation layer."""

    tokens: list[str]
    scores: np.ndarray  # (len(tokens), len(tokens)): of row i, whose state is refined, with column j

    def to_tsv(self) -> str:
        """Return a table: a row and a column for each token."""
        rows = [["token", *self.tokens]]
        for token, row in zip(self.tokens, self.scores, strict=True):
            rows.append([token, *(f"{score:.6f}" for score in row)])
        return tsv(rows)


def relation_scores(translator: Translator, sentence: str, layer: int = 0) -> RelationScores:
    """
    Encode a sentence with an RNMT model and return the scores of a relation layer.

    Raises:
        ValueError: The model has no relation layers or no such layer, or the sentence is empty.
    """
    encoded, tokens = run_encoder(translator, sentence)
    scores = getattr(encoded, "relation_scores", None)
    if not scores:
        raise UserError(
            f"This {short_repr(translator.inspected_model().config.model_type)} model has no relation layers "
            "(relation_layers=0). Pass an RNMT."
        )
    check_index("layer", layer, len(scores))
    return RelationScores(tokens, scores[layer][0].float().cpu().numpy())


def inspect_relations(translator: Translator, sentence: str, output: str | None = None, layer: int = 0) -> str:
    """Return the scores of a relation layer as a table, or plot them and return a summary."""
    from .plots import heat_maps

    relations = relation_scores(translator, sentence, layer)
    if output is None:
        return relations.to_tsv()
    title = f"Strength of the relations between source tokens, relation layer {layer}"
    panels, names = [("", relations.scores)], relations.tokens
    labels: dict[str, Any] = {"title": title, "column_name": "related token", "name": "length of the relation vector"}
    heat_maps(panels, names, names, "refined token", output, **labels)
    return f"{output}: relations of {len(names)} tokens\n"
