"""Base class of all configurations: shared fields, their checks, and named presets."""

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, TypeVar

from transformers import PreTrainedConfig

from .user_errors import UserError


T = TypeVar("T")
if TYPE_CHECKING:
    Filled = Annotated[T, "None until the configuration is made, never afterwards"]
else:
    Filled = Optional
FROM_OTHERS: Any = None  # the default of a field that follows from others

# No network is as large as this; a number beyond it is a mistake, found before memory is asked for.
MOST_LAYERS, LARGEST_SIZE, LARGEST_TABLE = 1000, 2**24, 2**30


def registered_class(kind: type) -> Any:
    """The nearest class, itself or a base, on which `register_for_auto_class` was called; `None`: there is none."""
    return next((base for base in kind.__mro__ if vars(base).get("_auto_class")), None)


def without_code(kind: type[T]) -> type[T]:
    """The class as it would be if `register_for_auto_class` had been called on none of its base classes."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "_auto_class": None})


class Seq2SeqConfig(PreTrainedConfig):
    r"""
    Fields of every encoder-decoder model, with the defaults of the base Transformer (Vaswani et al., 2017).

    Args:
        vocab_size (`int`, *optional*, defaults to 32000):
            Rows of the source embedding, and of the target embedding and output matrix unless `decoder_vocab_size`
            says otherwise.
        decoder_vocab_size (`int`, *optional*):
            Rows of the target embedding and of the output matrix. `None` means `vocab_size`.
        d_model (`int`, *optional*, defaults to 512):
            Width of embeddings and hidden states.
        encoder_layers (`int`, *optional*, defaults to 6):
            Number of encoder layers.
        decoder_layers (`int`, *optional*, defaults to 6):
            Number of decoder layers.
        dropout (`float`, *optional*, defaults to 0.1):
            Dropout of the embeddings, and of what a model says.
        scale_embedding (`bool`, *optional*, defaults to `True`):
            Multiply embeddings by `sqrt(d_model)`.
        max_position_embeddings (`int`, *optional*, defaults to 1024):
            Rows of the position tables, which no sequence of a model that has some may exceed. Without positions it
            bounds nothing but the length of validation sentences and of what `generate` makes by default.
        share_encoder_decoder_embeddings (`bool`, *optional*, defaults to `True`):
            One embedding matrix for source and target. Needs equal vocabularies.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`):
            The output matrix is the target embedding matrix.
        final_logits_bias (`bool`, *optional*, defaults to `False`):
            Adds a fixed bias to the logits, as checkpoints of MarianMT have it.
        init_std (`float`, *optional*):
            Standard deviation of the normal initialisation of all matrices. `None`: Xavier-uniform matrices and
            embeddings of deviation `d_model ** -0.5`.
        use_cache (`bool`, *optional*, defaults to `True`):
            Whether generation keeps keys, values and recurrent states.

    Raises:
        ValueError: A value has the wrong type or range; the message names the field, the value, what is allowed and
            the remedy.
    """

    keys_to_ignore_at_inference = ["past_key_values", "encoder_last_hidden_state"]
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers"}
    # Sizes by name; a preset is data.
    presets: ClassVar[dict[str, dict[str, Any]]] = {"base": {}}

    # Fields that earlier releases wrote into config.json and that changed nothing: read over.
    former_fields: ClassVar[frozenset[str]] = frozenset()
    # Of a variant whose paper trains a baseline first: what goes wrong without one, for a warning.
    baseline_first: ClassVar[str | None] = None

    vocab_size: int = 32000
    decoder_vocab_size: Filled[int] = FROM_OTHERS
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float | int = 0.1
    scale_embedding: bool = True
    max_position_embeddings: int = 1024
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    final_logits_bias: bool = False
    init_std: float | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name not in self.former_fields}
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        self.check_values()

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "Seq2SeqConfig":
        """
        A configuration of a named size.

        Args:
            name (`str`): One of `cls.presets`, e.g. `"tiny"`, `"small"`, `"base"`, `"big"`.
            **overrides: Fields that replace the preset's.

        Raises:
            ValueError: No preset has that name.
        """
        if name not in cls.presets:
            raise UserError(
                f"{cls.__name__} has no preset {name!r}; choose one of {', '.join(sorted(cls.presets))}, or pass the "
                f"fields to {cls.__name__}(...) yourself."
            )
        return cls(**{**cls.presets[name], **overrides})

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """
        As in transformers. The code of the class is saved too, if `register_for_auto_class` was called on it; that of
        its base class, if both have one `model_type`.
        """
        given = type(self)
        coded = registered_class(given) or given
        # Values are saved where they differ from the defaults of the class that loads them.
        self.__class__ = without_code(given) if coded.model_type != given.model_type else coded
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = given

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """
        As in transformers, and two things more: the decoder's view names the kinds of its cache layers
        (`cache_layer_types`), and a model with two vocabularies is viewed from its decoder, because generation takes
        the number of target symbols from the `vocab_size` of this call.
        """
        if decoder is None and encoder is None and self.decoder_vocab_size != self.vocab_size:
            decoder = True
        view = super().get_text_config(decoder=decoder, encoder=encoder)
        # A view of a view, as caches make one, may lack the fields that the first one was made from.
        kinds = vars(self).get("layer_types") or self.cache_layer_types()
        if decoder and view is not self and kinds is not None:
            view.layer_types = kinds
        return view

    def cache_layer_types(self) -> list[str] | None:
        """One kind of cache layer for each decoder layer, where some hold recurrent states; `None`: all plain."""
        return None

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        """Which of `"source"` and `"target"` have a table of positions, `max_position_embeddings` long."""
        return ()

    @property
    def attends_source_words(self) -> bool:
        """Whether the weights of the decoder's attention link target to source words."""
        return True

    def baseline(self) -> "Seq2SeqConfig | None":
        """The plain model that this variant starts from in two-stage training; `None` where it is one or has none."""
        return None

    def fields_of(self, kind: type["Seq2SeqConfig"]) -> dict[str, Any]:
        """The values of the fields that `kind` and the classes of the zoo above it declare, as keywords for it."""
        declared = {name for base in kind.__mro__ if issubclass(base, Seq2SeqConfig) for name in base.__annotations__}
        return {field.name: getattr(self, field.name) for field in fields(kind) if field.name in declared}

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_values(self) -> None:
        """Checks all fields together; subclasses extend it. Raises `ValueError` with the remedy."""
        self.check_whole("vocab_size", "decoder_vocab_size", "d_model", "max_position_embeddings")
        self.check_whole("encoder_layers", "decoder_layers", maximum=MOST_LAYERS)
        if self.max_position_embeddings * self.d_model > LARGEST_TABLE:
            self.refuse(
                "max_position_embeddings",
                f"at most {LARGEST_TABLE // self.d_model} with d_model={self.d_model}",
                "use as many positions as the longest sentence has tokens",
            )
        self.check_fraction("dropout")
        self.check_flag(
            "scale_embedding",
            "share_encoder_decoder_embeddings",
            "tie_word_embeddings",
            "final_logits_bias",
            "use_cache",
        )
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            self.refuse(
                "decoder_vocab_size",
                f"vocab_size={self.vocab_size} while share_encoder_decoder_embeddings=True",
                "set share_encoder_decoder_embeddings=False for separate vocabularies",
            )
        if self.init_std is not None and not (isinstance(self.init_std, (int, float)) and 0 <= self.init_std < 1e6):
            self.refuse("init_std", "None or a number >= 0", "leave it out for Xavier-uniform initialisation")
        for name, size in (
            ("pad_token_id", min(self.vocab_size, self.decoder_vocab_size)),
            ("decoder_start_token_id", self.decoder_vocab_size),
            ("bos_token_id", self.decoder_vocab_size),
            ("eos_token_id", self.decoder_vocab_size),
        ):
            value = getattr(self, name)
            for one in value if isinstance(value, list) else [value]:
                if one is not None and not (isinstance(one, int) and 0 <= one < size):
                    self.refuse(
                        name, f"None or an id from 0 to {size - 1}", "take it from the tokenizer, or enlarge vocab_size"
                    )

    def refuse(self, field: str, allowed: str, remedy: str) -> None:
        """Raises the `ValueError` of one field: name, value, what is allowed, remedy."""
        raise UserError(
            f"{type(self).__name__}: {field}={getattr(self, field)!r} is not allowed; it must be {allowed}. "
            f"Remedy: {remedy}."
        )

    def check_whole(self, *fields: str, minimum: int = 1, maximum: int = LARGEST_SIZE) -> None:
        for field in fields:
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                self.refuse(field, f"a whole number >= {minimum}", f"use {minimum} or more")
            if value > maximum:
                self.refuse(field, f"at most {maximum}", "see whether a digit is too many")

    def check_fraction(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                self.refuse(field, "a number from 0 to below 1", "0.1 is usual, 0 switches it off")

    def check_flag(self, *fields: str) -> None:
        for field in fields:
            if not isinstance(getattr(self, field), bool):
                self.refuse(field, "True or False", "write a Python bool (true/false in JSON and YAML)")

    def check_choice(self, field: str, choices: tuple[Any, ...]) -> None:
        if getattr(self, field) not in choices:
            named = ", ".join(repr(choice) for choice in choices)
            self.refuse(field, f"one of {named}", "choose one of them")
