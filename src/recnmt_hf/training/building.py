"""Section `model` of recipes: its check, the classes that it names, and the configuration of its model."""

import pkgutil
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
)

from .._loading_errors import folder_of_model
from ..data.tokenizer_pair import TokenizerPair, number_of_symbols, stamp_tokenizers
from ..errors import UserError, explained, short_repr
from ..families import MODEL_TYPES
from ..models.configuration_seq2seq import Seq2SeqConfig
from ..models.seq2seq_base import Seq2SeqConditionalGeneration
from ..options import Range, check_content, check_options, check_value, documented, given_fields, option
from .processes import logger


CLASS_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)[.:]([^\W\d]\w*)")
# Larger sizes are typing errors; they are rejected before memory is allocated.
MOST_SIZE = 10**7


@documented
@dataclass
class ModelSection:
    """Section `model`: the model to train."""

    type: str = option(
        "nmt_transformer", f"model family: {', '.join(MODEL_TYPES)}, another of `AutoConfig`, or `package.module:Class`"
    )
    preset: str = option("small", "size of the model, e.g. tiny, small, base or big")
    fields: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "configuration fields that replace the preset's"}
    )
    init_from: str | None = option(
        None,
        "folder or Hub id of a model whose weights, tokenizers and settings are reused; `fields` overrides settings",
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_content(self.fields, "fields")
        if self.init_from is not None:
            self.init_from = folder_of_model(self.init_from)


@dataclass(frozen=True)
class Architecture:
    """The model that a plan trains; the fields are those of [`ModelSection`]."""

    type: str = "nmt_transformer"
    preset: str = "small"
    fields: Mapping[str, Any] = field(default_factory=dict)
    init_from: str | None = None

    def __str__(self) -> str:
        changed = "".join(f", {name}={short_repr(value)}" for name, value in list(self.fields.items())[:6])
        return f"{self.type} ({self.preset}{changed})"


def config_class_of(name: str) -> type[Seq2SeqConfig]:
    """Return the configuration class of `model.type`. A class path is imported and registered with the Auto classes."""
    if name in CONFIG_MAPPING and issubclass(CONFIG_MAPPING[name], Seq2SeqConfig):
        return cast("type[Seq2SeqConfig]", CONFIG_MAPPING[name])
    if not CLASS_PATH.fullmatch(name):
        check_value("model.type", name, Literal[tuple(MODEL_TYPES)])
    with explained(f"model.type={name} cannot be imported", name, (ImportError, AttributeError)):
        model_class: Any = pkgutil.resolve_name(CLASS_PATH.sub(r"\1:\2", name))
    config_class: Any = getattr(model_class, "config_class", None)
    model_type: Any = getattr(config_class, "model_type", None)
    is_model = isinstance(model_class, type) and issubclass(model_class, Seq2SeqConditionalGeneration)
    owner: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(config_class, model_class) if is_model else None
    is_free = model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] is config_class
    if not (model_type and is_free and owner is model_class):
        reason = "must be a subclass of Seq2SeqConditionalGeneration with a model_type of its own"
        raise UserError(f"model.type={name} {reason}.", field=name)
    AutoConfig.register(model_type, config_class, exist_ok=True)
    if model_class.model_class.config_class is config_class:  # a class of its own, not that of the base family
        AutoModel.register(config_class, model_class.model_class, exist_ok=True)
    AutoModelForSeq2SeqLM.register(config_class, model_class, exist_ok=True)
    return cast("type[Seq2SeqConfig]", config_class)


def build_config(section: Architecture, **vocabulary: Any) -> Any:
    """Build the configuration of a recipe's model; `vocabulary` has defaults from the tokenizers."""
    config_class = config_class_of(section.type)
    known = {field.name for field in fields(config_class)} | config_class.former_fields
    given_fields(section.fields, known, "model.fields")
    check_value("model.preset", section.preset, Literal[tuple(config_class.presets)])
    try:
        return config_class.from_preset(section.preset, **{**vocabulary, **section.fields})
    except UserError as error:
        raise error.inside("model.fields") from error


def stage_configs(section: Architecture, tokenizers: TokenizerPair, with_baseline: bool = False) -> list[Any]:
    """Build the configurations of the stages for the tokenizers of a recipe's model."""
    source, target = tokenizers
    tokenizers.check_padding()
    vocabulary = {
        "vocab_size": number_of_symbols(source),
        "decoder_vocab_size": number_of_symbols(target, is_target=True),
        "share_encoder_decoder_embeddings": tokenizers.is_joint,
        "pad_token_id": target.pad_token_id,
        "eos_token_id": target.eos_token_id,
        "bos_token_id": target.bos_token_id,
        "decoder_start_token_id": target.pad_token_id if target.bos_token_id is None else target.bos_token_id,
    }
    if tokenizers.relations is not None and hasattr(config_class_of(section.type), "num_relations"):
        vocabulary["num_relations"] = len(tokenizers.relations)
    for name in ("vocab_size", "decoder_vocab_size", "num_relations"):
        if name in section.fields and name in vocabulary:
            least = Range(least=vocabulary[name])  # the tokenizer's size
            check_value(f"model.fields.{name}", section.fields[name], int | None, least)
    config = build_config(section, **vocabulary)
    configs = [config.baseline(), config] if with_baseline else [config]
    for stage_config in configs:
        stamp_tokenizers(stage_config, source, target)
    return configs


# Fields without parameters that decide what the weights of a trained model compute. Numbers of heads apply if the
# widths are equal, positions if the kinds of self-attention are; the last ones belong to parts of single families.
OF_LAYERS = {
    *("activation_function", "scale_embedding", "normalize_before", "layer_norm_eps", "final_logits_bias"),
    *("self_attention_type", "directional_include_self", "aan_activation"),
}
OF_PARTS = {
    *("routing_iterations", "routing_softmax_axis", "recurrence_steps", "recurrence_position_embeddings"),
    *("recurrence_source", "fusion_gate", "encoder_shortcut", "rnn_input_position_embeddings", "relation_residual"),
    *("relation_conv_mode", "gcn_residual", "gcn_root", "gcn_subwords"),
}


def with_fields_of(folder: str | Path, section: Architecture) -> Architecture:
    """Add the fields of a trained model that decide what its weights compute, unless the recipe states them."""
    trained: Any = None
    with suppress(OSError, ValueError):  # without a readable configuration
        trained = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(trained, Seq2SeqConfig):
        return section
    own = build_config(section)
    names = OF_LAYERS | (OF_PARTS - set(own.presets[section.preset]))
    if trained.d_model == own.d_model:
        names |= {"encoder_attention_heads", "decoder_attention_heads"}
    kind = getattr(trained, "self_attention_type", None)
    if section.fields.get("self_attention_type", kind) == kind:
        names |= {"position_embedding_type", "encoder_position_embeddings", "decoder_position_embeddings"}
    names &= {entry.name for entry in fields(own)} & {entry.name for entry in fields(trained)} - section.fields.keys()
    kept = {name: getattr(trained, name) for name in sorted(names)}
    if changes := [f"{name}: {value}" for name, value in kept.items() if value != getattr(own, name)]:
        logger.info(f"Fields of {folder} that the recipe does not state: {', '.join(changes)}.")
    return replace(section, fields={**kept, **section.fields})
