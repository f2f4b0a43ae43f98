"""Recipes of logical inference: encoders, pairs of formulas, and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from logic import MAX_OPERATORS, RELATIONS

from recnmt_hf import ONLSTMTransformerConfig
from recnmt_hf.errors import UserError
from recnmt_hf.options import DEFAULT, MOST_SEED, Range, check_options, given_fields, mapping, option, parse
from recnmt_hf.training.recipe import NAME_OF_A_TEST_SET
from recnmt_hf.training.recipe_yaml import apply_overrides, dump_yaml, read_recipe


@dataclass
class LogicData:
    """Pairs of formulas."""

    folder: str | None = option(
        None, "folder with train0.tsv to test12.tsv, plain or compressed (logic.py); null: generate them"
    )
    pairs: Annotated[int, Range(least=1, most=10**8)] = option(500_000, "number of pairs to generate")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "seed of the generator")
    most_operators: Annotated[int, Range(least=0, most=MAX_OPERATORS)] = option(
        6, "maximum number of operators in training formulas"
    )
    validation_every: Annotated[int, Range(least=2)] = option(10, "use every n-th training pair for validation")


@dataclass
class LogicTraining:
    """Training of an encoder with its classifier: Adam; the epoch with the best validation accuracy is used."""

    epochs: Annotated[int, Range(least=1, most=10_000)] = option(50, "maximum number of passes over the training pairs")
    patience: Annotated[int | None, Range(least=1)] = option(
        None, "epochs without a better accuracy before training stops; null: never"
    )
    batch_size: Annotated[int, Range(least=1)] = option(64, "pairs per batch and device")
    learning_rate: Annotated[float, Range(above=0)] = option(1e-3, "learning rate of Adam")
    schedule: str = option(
        "constant",
        "schedule of the learning rate; plateau: halve it after an epoch without a better accuracy",
        choices=("constant", "linear", "cosine", "plateau"),
    )
    warmup_steps: Annotated[int, Range(least=0)] = option(0, "steps with a rising learning rate; not with plateau")
    weight_decay: Annotated[float, Range(least=0)] = option(0.0, "weight decay of AdamW")
    max_grad_norm: Annotated[float, Range(least=0)] = option(5.0, "maximum norm of gradients; 0: no limit")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "seed of initial weights, dropout and batches")
    bf16: bool = option(False, "run matmuls in bfloat16")
    use_cpu: bool = option(False, "run on the CPU even if there is an accelerator")


@dataclass
class LogicRecipe:
    """
    Experiments of logical inference.

    Args:
        models (`dict`): For each name a `preset` of [`ONLSTMTransformerConfig`] and optional `fields` that override
            it.
        data ([`LogicData`] or mapping), training ([`LogicTraining`] or mapping): The sections above.

    Raises:
        UserError, SystemExit: A section or field does not exist, or a value is not allowed; the message names it.
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
            raise SystemExit("The recipe has no models; add one, e.g. models: {hybrid: {preset: logic_hybrid}}")
        for name, value in self.models.items():
            if not NAME_OF_A_TEST_SET.fullmatch(name):
                raise SystemExit(f"models: the name {name!r} may only have letters, digits, _, - and .")
            value = given_fields(value, ("preset", "fields"), f"models.{name}")
            model_fields = mapping(value.get("fields"), f"models.{name}.fields")
            self.models[name] = {"preset": value.get("preset", "logic_hybrid"), "fields": model_fields}
            self.config(name, len(RELATIONS))
        if self.training.schedule == "plateau" and self.training.warmup_steps:
            raise SystemExit("training.warmup_steps has no effect with schedule=plateau; remove one of them")

    def config(self, name: str, vocab_size: int) -> ONLSTMTransformerConfig:
        """
        Return the configuration of a model; `UserError` if its preset or a field does not exist, or a value is not
        allowed.
        """
        place, chosen = f"models.{name}", self.models[name]
        known = (entry.name for entry in fields(ONLSTMTransformerConfig))
        model_fields = given_fields(chosen["fields"], known, f"{place}.fields")
        labels = dict(enumerate(RELATIONS))
        try:
            return ONLSTMTransformerConfig.from_preset(
                str(chosen["preset"]),
                **{"vocab_size": vocab_size, "max_position_embeddings": 1024, "id2label": labels, **model_fields},
                label2id={label: number for number, label in labels.items()},
            )
        except UserError as error:
            raise error.inside(place) from error

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> LogicRecipe:
        """Load a recipe as `recnmt_hf.Recipe.from_file` does."""
        known = {entry.name for entry in fields(cls)}
        return cls(**given_fields(apply_overrides(read_recipe(Path(path)), overrides), known))

    def alone(self, name: str) -> str:
        """Return the parts of the recipe that a resumed run must not change, as YAML: data, training and its model."""
        return dump_yaml({**asdict(self), "models": {name: self.models[name]}})
