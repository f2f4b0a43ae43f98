"""Base class of the configurations of Transformers."""

from typing import Any, ClassVar, Literal

from .configuration_seq2seq import DERIVED, Filled, Seq2SeqConfig, positive, probability, size, strict_config


def layer_sizes(d_model: int, layers: int, heads: int, ffn_dim: int, **fields: Any) -> dict[str, Any]:
    """Return the fields of a preset with equal sizes in encoder and decoder."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": ffn_dim}
    sides = {f"{side}_{name}": number for name, number in sizes.items() for side in ("encoder", "decoder")}
    return {"d_model": d_model, **sides, **fields}


@strict_config
class TransformerConfig(Seq2SeqConfig):
    r"""
    Fields of every model with Transformer layers (Vaswani et al., 2017). All fields of [`Seq2SeqConfig`], and:

    Args:
        encoder_attention_heads (`int`, *optional*, defaults to 8): Heads of each encoder self-attention; a divisor of
            `d_model`, which is even.
        decoder_attention_heads (`int`, *optional*, defaults to 8): Heads of each decoder self- and cross-attention.
        encoder_ffn_dim, decoder_ffn_dim (`int`, *optional*, default to 2048): Inner width of the feed-forward blocks.
        activation_function (`str`, *optional*, defaults to `"relu"`): Activation of the feed-forward blocks; any name
            of `transformers.activations.ACT2FN`.
        attention_dropout (`float`, *optional*, defaults to 0.1): Dropout of the attention weights.
        activation_dropout (`float`, *optional*, defaults to 0.1): Dropout after the feed-forward activation.
        normalize_before (`bool`, *optional*, defaults to `False`): `False`: post-norm, `LN(x + sub(x))`, no norm after
            the last layer. `True`: pre-norm, `x + sub(LN(x))`, with one norm after the last layer.
        layer_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the layer norms.
        position_embedding_type (`str`, *optional*): `"sinusoidal"` (the paper's interleaved sine and cosine),
            `"marian"` (transformers' MarianMT: sines first, then cosines), `"tensor2tensor"` (the same order with the
            frequencies of tensor2tensor, THUMT and Marian itself), `"learned"` or `"none"`. `None` means
            `"sinusoidal"` in most models.
        encoder_position_embeddings, decoder_position_embeddings (`bool`, *optional*, default to `True`): `False`
            removes positions from the input.
        alignment_head (`list[int]`, *optional*): `[decoder layer, head]`, from 0, of the cross-attention that was
            trained to align words; word alignment reads it by default.
    """

    attribute_map = {**Seq2SeqConfig.attribute_map, "num_attention_heads": "encoder_attention_heads"}
    # Subclasses add their own fields to a copy.
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": layer_sizes(128, 2, 4, 256, attention_dropout=0.0, activation_dropout=0.0),
        "small": layer_sizes(256, 3, 4, 1024, dropout=0.2),
        "base": {},
        "big": layer_sizes(1024, 6, 16, 4096, dropout=0.3),
    }

    encoder_attention_heads: int = size(8)
    decoder_attention_heads: int = size(8)
    encoder_ffn_dim: int = size(2048)
    decoder_ffn_dim: int = size(2048)
    activation_function: str = "relu"
    attention_dropout: float | int = probability(0.1)
    activation_dropout: float | int = probability(0.1)
    normalize_before: bool = False
    layer_norm_eps: float = positive(1e-5)
    position_embedding_type: Filled[Literal["sinusoidal", "marian", "tensor2tensor", "learned", "none"]] = DERIVED
    encoder_position_embeddings: bool = True
    decoder_position_embeddings: bool = True
    alignment_head: list[int] | None = None

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
        from transformers.activations import ACT2FN  # here, since it imports all that models need

        super().check_values()
        self.require(self.activation_function in ACT2FN, "activation_function", "a name in transformers' ACT2FN")
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            self.require(self.d_model % getattr(self, name) == 0, name, "a divisor of d_model", "d_model")
        self.require(self.d_model % 2 == 0, "d_model", "even")
        if self.alignment_head is not None:
            layer, head = self.alignment_head if len(self.alignment_head) == 2 else (-1, -1)
            exists = 0 <= layer < self.decoder_layers and 0 <= head < self.decoder_attention_heads
            others = "decoder_layers", "decoder_attention_heads"
            self.require(exists, "alignment_head", "None or [decoder layer, head], counted from 0", *others)
