"""Base class of the configurations of Transformers."""

from typing import Any, ClassVar

from .configuration_seq2seq import FROM_OTHERS, Filled, Seq2SeqConfig


POSITION_EMBEDDING_TYPES = ("sinusoidal", "marian", "learned", "none")


class TransformerConfig(Seq2SeqConfig):
    r"""
    Fields of every model with Transformer layers (Vaswani et al., 2017). All fields of [`Seq2SeqConfig`], and:

    Args:
        encoder_attention_heads (`int`, *optional*, defaults to 8):
            Heads of each encoder self-attention; a divisor of `d_model`, which is even.
        decoder_attention_heads (`int`, *optional*, defaults to 8):
            Heads of each decoder self- and cross-attention.
        encoder_ffn_dim (`int`, *optional*, defaults to 2048):
            Inner width of the encoder's feed-forward blocks.
        decoder_ffn_dim (`int`, *optional*, defaults to 2048):
            Inner width of the decoder's feed-forward blocks.
        activation_function (`str`, *optional*, defaults to `"relu"`):
            Activation of the feed-forward blocks; any name of `transformers.activations.ACT2FN`.
        attention_dropout (`float`, *optional*, defaults to 0.1):
            Dropout of the attention weights.
        activation_dropout (`float`, *optional*, defaults to 0.1):
            Dropout after the feed-forward activation.
        normalize_before (`bool`, *optional*, defaults to `False`):
            `False`: post-norm, `LN(x + sub(x))`, no norm after the last layer. `True`: pre-norm, `x + sub(LN(x))`,
            with one norm after the last layer.
        layer_norm_eps (`float`, *optional*, defaults to 1e-5):
            Epsilon of the layer norms.
        position_embedding_type (`str`, *optional*):
            `"sinusoidal"` (the paper's interleaved sine and cosine), `"marian"` (sines first, then cosines),
            `"learned"` or `"none"`. `None` means `"sinusoidal"`, except where a model says otherwise.
        encoder_position_embeddings (`bool`, *optional*, defaults to `True`):
            `False` removes positions from the encoder's input.
        decoder_position_embeddings (`bool`, *optional*, defaults to `True`):
            `False` removes positions from the decoder's input.
    """

    attribute_map = {**Seq2SeqConfig.attribute_map, "num_attention_heads": "encoder_attention_heads"}
    # Subclasses add their own fields to a copy.
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
        "small": {
            "d_model": 256,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 1024,
            "decoder_ffn_dim": 1024,
            "dropout": 0.2,
        },
        "base": {},
        "big": {
            "d_model": 1024,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "dropout": 0.3,
        },
    }

    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    activation_function: str = "relu"
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.1
    normalize_before: bool = False
    layer_norm_eps: float = 1e-5
    position_embedding_type: Filled[str] = FROM_OTHERS
    encoder_position_embeddings: bool = True
    decoder_position_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.position_embedding_type is None:
            self.position_embedding_type = self.default_position_embedding_type()
        super().__post_init__(**kwargs)

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        sides = {"source": self.encoder_position_embeddings, "target": self.decoder_position_embeddings}
        return tuple(side for side, has in sides.items() if has and self.position_embedding_type != "none")

    def default_position_embedding_type(self) -> str:
        """Return the type of position embeddings, with the default for `None`."""
        return "sinusoidal"

    def check_values(self) -> None:
        super().check_values()
        heads = ("encoder_attention_heads", "decoder_attention_heads")
        self.check_whole(*heads, "encoder_ffn_dim", "decoder_ffn_dim")
        self.check_fraction("attention_dropout", "activation_dropout")
        self.check_flag("normalize_before", "encoder_position_embeddings", "decoder_position_embeddings")
        self.check_choice("position_embedding_type", POSITION_EMBEDDING_TYPES)
        from transformers.activations import ACT2FN  # imports torch: only needed once a config is made

        if not isinstance(self.activation_function, str) or self.activation_function not in ACT2FN:
            self.refuse("activation_function", "a name in transformers.activations.ACT2FN", 'use "relu" or "gelu"')
        for name in heads:
            if self.d_model % getattr(self, name):
                self.refuse(
                    name,
                    f"a divisor of d_model={self.d_model}",
                    f"change {name} or d_model so that each head has the same width",
                )
        if self.d_model % 2:
            self.refuse("d_model", "an even number (sines and cosines come in pairs)", "use an even width")
        if not (isinstance(self.layer_norm_eps, float) and self.layer_norm_eps > 0):
            self.refuse("layer_norm_eps", "a number > 0", "use 1e-5")
