"""Recipes of logical inference: which encoders, which pairs of formulas, and how they are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from .._values import DEFAULT, MOST_SEED, Range, check_options, documented, given_fields, mapping, option, parse, shown
from ..data.logic import MOST_OPERATORS, RELATIONS
from ..models.configuration_onlstm_transformer import ONLSTMTransformerConfig
from ..models.user_errors import UserError
from ..training.recipe import NAME_OF_A_TEST_SET
from ..training.recipe_yaml import content_of, dump_yaml


@documented
@dataclass
class LogicData:
    """Which pairs of formulas."""

    folder: str | None = option(
        None, "holds train0.tsv to test12.tsv, gzipped perhaps (`recnmt logic-corpus`); null: they are generated"
    )
    pairs: Annotated[int, Range(least=1, most=10**8)] = option(500_000, "pairs to generate")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "of the generator")
    most_operators: Annotated[int, Range(least=0, most=MOST_OPERATORS)] = option(
        6, "operators of the longest formulas to train on"
    )
    validation_every: Annotated[int, Range(least=2)] = option(10, "each n-th training pair is for validation instead")


@documented
@dataclass
class LogicTraining:
    """How an encoder with its classifier is trained: Adam; the best epoch by validation accuracy is kept."""

    epochs: Annotated[int, Range(least=1, most=10_000)] = option(50, "most passes over the training pairs")
    patience: Annotated[int | None, Range(least=1)] = option(
        None, "epochs without a better accuracy after which it ends; null: all epochs"
    )
    batch_size: Annotated[int, Range(least=1)] = option(64, "pairs of a batch on one device")
    learning_rate: Annotated[float, Range(above=0)] = option(1e-3, "of Adam")
    schedule: str = option(
        "constant",
        "of the learning rate; plateau: halved after an epoch without a better accuracy",
        choices=("constant", "linear", "cosine", "plateau"),
    )
    warmup_steps: Annotated[int, Range(least=0)] = option(0, "steps over which it rises from 0; not with plateau")
    weight_decay: Annotated[float, Range(least=0)] = option(0.0, "of AdamW")
    max_grad_norm: Annotated[float, Range(least=0)] = option(5.0, "longer gradients are scaled down; 0: none")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "of the first weights, dropout and batches")
    bf16: bool = option(False, "whether matmuls run in bfloat16")
    use_cpu: bool = option(False, "whether to leave an accelerator alone")


@dataclass
class LogicRecipe:
    """
    Experiments of logical inference.

    Args:
        models (`dict`): For each name a `preset` of [`ONLSTMTransformerConfig`] and, perhaps, `fields` in place of the
            preset's.
        data ([`LogicData`] or mapping), training ([`LogicTraining`] or mapping): The sections above.

    Raises:
        ValueError: A section or field does not exist, or a value is not allowed; the message names it.
    """

    models: dict[str, Any] = field(default_factory=dict)
    data: LogicData = field(default_factory=LogicData)
    training: LogicTraining = field(default_factory=LogicTraining)

    def __post_init__(self) -> None:
        for name, kind in (("data", LogicData), ("training", LogicTraining)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                value = parse(kind, value, name)
                setattr(self, name, value)
            check_options(value, f"{name}.")
        models = mapping(self.models, "models")
        self.models = {str(name): value for name, value in models.items() if value not in (None, DEFAULT)}
        if not self.models:
            raise UserError("models is empty. Remedy: name one, e.g. models: {hybrid: {preset: logic_hybrid}}.")
        for name, value in self.models.items():
            if not NAME_OF_A_TEST_SET.fullmatch(name):
                raise UserError(
                    f"models: {shown(name)} is no name of a folder; it must be letters, digits, _, - and . Remedy: "
                    "choose another."
                )
            value = given_fields(value, ("preset", "fields"), f"models.{name}")
            self.models[name] = {
                "preset": value.get("preset", "logic_hybrid"),
                "fields": mapping(value.get("fields"), f"models.{name}.fields"),
            }
            self.config(name, len(RELATIONS))
        if self.training.schedule == "plateau" and self.training.warmup_steps:
            raise UserError(
                f"training.warmup_steps={self.training.warmup_steps} has no effect with schedule=plateau. Remedy: "
                "leave one of them out."
            )

    def config(self, name: str, vocab_size: int) -> ONLSTMTransformerConfig:
        """
        The configuration of a model.

        Raises:
            ValueError: Its preset or a field of it does not exist, or a value is not allowed.
        """
        place, chosen = f"models.{name}", self.models[name]
        known = [entry.name for entry in fields(ONLSTMTransformerConfig)]
        model_fields = given_fields(chosen["fields"], known, f"{place}.fields")
        labels = dict(enumerate(RELATIONS))
        try:
            return ONLSTMTransformerConfig.from_preset(
                str(chosen["preset"]),
                **{"vocab_size": vocab_size, "max_position_embeddings": 1024, "id2label": labels, **model_fields},
                label2id={label: number for number, label in labels.items()},
            )
        except UserError as error:
            raise UserError(f"{place}: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> LogicRecipe:
        """As [`~recnmt_hf.training.recipe.Recipe.from_file`], with other sections."""
        known = {entry.name for entry in fields(cls)}
        return cls(**given_fields(content_of(Path(path), overrides, known), known, "the recipe"))

    def alone(self, name: str) -> str:
        """Return what must stay the same when a model's run is resumed: data, training and its own section, as YAML."""
        content = dataclasses.asdict(self)
        return dump_yaml({**content, "models": {name: self.models[name]}})
