"""Base class of all configurations: shared fields, their checks, and named presets."""

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, TypeVar

from huggingface_hub.dataclasses import as_validated_field, strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import PreTrainedConfig

from .user_errors import UserError, short_repr


T = TypeVar("T")
if TYPE_CHECKING:
    Filled = Annotated[T, "None until the configuration is complete, never afterwards"]
else:
    Filled = Optional
DERIVED: Any = None  # default of a field whose value follows from other fields

# Larger numbers are mistakes: no network has as many layers or channels, or as large a table of positions.
MOST_LAYERS, LARGEST_SIZE, LARGEST_TABLE = 1000, 2**24, 2**30


def interval(least: float, most: float, allowed: str | None = None) -> Any:
    """Return a type of field, to be called with a default: a number from `least` to `most`, or `None`."""

    @as_validated_field
    def check(value: float | None) -> None:
        if value is not None and (isinstance(value, bool) or not least <= value <= most):
            raise ValueError(f"it must be {allowed or f'a number from {least} to {most}'}")

    return check


size, layer_count = interval(1, LARGEST_SIZE), interval(1, MOST_LAYERS)
any_size, any_layers = interval(0, LARGEST_SIZE), interval(0, MOST_LAYERS)
probability = interval(0, math.nextafter(1, 0), "a number from 0 to below 1")
positive = interval(math.nextafter(0, 1), math.inf, "a number above 0")


def assign_field(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Set a field of a configuration; raises `UserError` for a wrong value."""
    try:
        PreTrainedConfig.__setattr__(config, name, value)  # runs the validators of the configuration's own class
    except StrictDataclassFieldValidationError as error:
        raise UserError(f"{name}={short_repr(value)} is not allowed: {error.__cause__}.", field=name) from error


def strict_config(kind: type[T]) -> type[T]:
    """Let `strict` check types and ranges, with `UserError`s, and save the code of a family's configuration with it."""
    strict(kind)
    kind.__setattr__ = assign_field  # type: ignore[assignment, method-assign]
    if vars(kind).get("model_type"):
        kind.register_for_auto_class()  # type: ignore[attr-defined]
    return kind


def registered_class(kind: type) -> Any:
    """Return the nearest class among a class and its bases with `register_for_auto_class`, or `None`."""
    return next((base for base in kind.__mro__ if vars(base).get("_auto_class")), None)


def reset_registration(kind: type[T]) -> type[T]:
    """Remove the effect of `register_for_auto_class` on the bases of a class, and return the class."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "_auto_class": None})


@strict_config
class Seq2SeqConfig(PreTrainedConfig):
    r"""
    Fields of every encoder-decoder model, with the defaults of the base Transformer (Vaswani et al., 2017).

    Args:
        vocab_size (`int`, *optional*, defaults to 32000): Rows of the source embedding.
        decoder_vocab_size (`int`, *optional*): Rows of target embedding and output matrix. `None`: `vocab_size`.
        d_model (`int`, *optional*, defaults to 512): Width of embeddings and hidden states.
        encoder_layers, decoder_layers (`int`, *optional*, default to 6): Numbers of layers.
        dropout (`float`, *optional*, defaults to 0.1): Dropout of the embeddings, and where a model uses it.
        scale_embedding (`bool`, *optional*, defaults to `True`): Multiply embeddings by `sqrt(d_model)`.
        max_position_embeddings (`int`, *optional*, defaults to 1024): Rows of the position tables, and in all models
            the longest validation sentence and default length of `generate`.
        share_encoder_decoder_embeddings (`bool`, *optional*, defaults to `True`): One embedding matrix for source and
            target. Needs equal vocabularies.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): The output matrix is the target embedding matrix.
        final_logits_bias (`bool`, *optional*, defaults to `False`): Adds a fixed bias to the logits, as MarianMT does.
        init_std (`float`, *optional*): Standard deviation of the normal initialization of all matrices. `None`:
            Xavier-uniform matrices and embeddings of deviation `d_model ** -0.5`.
        use_cache (`bool`, *optional*, defaults to `True`): Store keys, values and recurrent states in generation.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values", "encoder_last_hidden_state"]
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers"}
    # Fields of named sizes.
    presets: ClassVar[dict[str, dict[str, Any]]] = {"base": {}}
    # Obsolete fields in config.json of earlier releases, ignored on load.
    former_fields: ClassVar[frozenset[str]] = frozenset()
    # For a variant whose paper trains a baseline first: text of the warning about training without one.
    baseline_first: ClassVar[str | None] = None

    vocab_size: int = size(32000)
    decoder_vocab_size: Filled[int] = size(DERIVED)
    d_model: int = size(512)
    encoder_layers: int = layer_count(6)
    decoder_layers: int = layer_count(6)
    dropout: float | int = probability(0.1)
    scale_embedding: bool = True
    max_position_embeddings: int = size(1024)
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    final_logits_bias: bool = False
    init_std: float | int | None = interval(0, 1e6)(None)
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        super().__post_init__(**{name: value for name, value in kwargs.items() if name not in self.former_fields})
        self.check_values()

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "Seq2SeqConfig":
        """
        Return a configuration of a named size.

        Args:
            name (`str`): One of `cls.presets`, e.g. `"tiny"`, `"small"`, `"base"`, `"big"`.
            **overrides: Fields that replace the preset's.
        """
        if name not in cls.presets:
            names = ", ".join(sorted(cls.presets))
            raise UserError(f"{cls.__name__} has no preset {short_repr(name)}. Choose one of {names}.", field="preset")
        return cls(**{**cls.presets[name], **overrides})

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the code of a class (or of its base) that `register_for_auto_class` knows."""
        own = type(self)
        coded = registered_class(own) or own
        # Values are saved where they differ from the defaults of the class that loads them.
        self.__class__ = reset_registration(own) if coded.model_type != own.model_type else coded
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = own

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return a view as transformers does; the decoder's has `layer_types`, those of its cache."""
        # Generation reads the number of target symbols from `vocab_size` of the default view.
        if decoder is None and encoder is None and self.decoder_vocab_size != self.vocab_size:
            decoder = True
        view = super().get_text_config(decoder=decoder, encoder=encoder)
        # Caches create a view of a view, which may lack the fields that the first one was created from.
        layer_types = vars(self).get("layer_types") or self.cache_layer_types()
        if decoder and view is not self and layer_types is not None:
            view.layer_types = layer_types
        return view

    def cache_layer_types(self) -> list[str] | None:
        """Return the type of each decoder layer's cache where some hold recurrent states, else `None`."""
        return None

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        """The sides, `"source"` and `"target"`, with a table of `max_position_embeddings` positions."""
        return ()

    @property
    def attends_source_words(self) -> bool:
        """`True` if the weights of the decoder's attention link target to source words."""
        return True

    @property
    def tree_options(self) -> dict[str, str] | None:
        """Arguments `subwords` and `root` of `TreeEncoder` for a model that reads `dependency_heads`, else `None`."""
        return None

    @property
    def random_field(self) -> str | None:
        """Name of the field by which outputs are random outside of training too, or `None`."""
        return None

    def baseline(self) -> "Seq2SeqConfig | None":
        """Return the configuration of the plain model from which two-stage training starts this variant, or `None`."""
        return None

    def fields_of(self, kind: type["Seq2SeqConfig"], **changes: Any) -> dict[str, Any]:
        """Return keywords for `kind`: the values of the fields that it and its bases in this package declare."""
        declared = {name for base in kind.__mro__ if issubclass(base, Seq2SeqConfig) for name in base.__annotations__}
        return {field.name: getattr(self, field.name) for field in fields(kind) if field.name in declared} | changes

    def validate_output_attentions(self) -> None:
        """Leave this check to the setter of `output_attentions`, which raises a plain `ValueError`."""

    def check_values(self) -> None:
        """Raise `UserError` for fields that contradict each other; subclasses extend it."""
        most = LARGEST_TABLE // self.d_model
        self.require(self.max_position_embeddings <= most, "max_position_embeddings", f"at most {most}", "d_model")
        shared = "share_encoder_decoder_embeddings"
        is_equal = self.decoder_vocab_size == self.vocab_size or not self.share_encoder_decoder_embeddings
        allowed = f"{self.vocab_size}; separate vocabularies need {shared}=False"
        self.require(is_equal, "decoder_vocab_size", allowed, shared)
        for name in ("pad_token_id", "decoder_start_token_id", "bos_token_id", "eos_token_id"):
            end = min(self.vocab_size, self.decoder_vocab_size) if name == "pad_token_id" else self.decoder_vocab_size
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            is_id = all(type(i) is int and 0 <= i < end for i in ids)
            self.require(is_id, name, f"None or an id of the vocabulary, from 0 to {end - 1}")

    def require(self, condition: bool, field: str, allowed: Any, *others: str) -> None:
        """Raise a `UserError` unless a condition on a field holds; `allowed` depends on the fields `others`."""
        if not condition:
            context = " with " * bool(others) + ", ".join(f"{name}={getattr(self, name)!r}" for name in others)
            value = short_repr(getattr(self, field))
            raise UserError(f"{field}={value} is not allowed{context}; it must be {allowed}.", field=field)
