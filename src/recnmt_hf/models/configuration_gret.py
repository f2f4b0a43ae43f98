"""Configuration of the Transformer with a global representation of the source."""

from typing import Any, Literal

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import DERIVED, Filled, interval, size, strict_config


@strict_config
class GRETConfig(NMTTransformerConfig):
    r"""
    Configuration of [`GRETModel`], the Transformer whose decoder also receives a vector of the whole source, computed
    from all encoder layers (Weng et al., 2020, "GRET: Global Representation Enhanced Transformer"). All fields of
    [`NMTTransformerConfig`], and:

    Args:
        use_global_state (`bool`, *optional*, defaults to `True`): `False` is the plain Transformer.
        global_capsule (`bool`, *optional*, defaults to `True`): Summarize a layer by capsules with dynamic routing
            (Eqs. 2-6). `False`: by the mean of its words.
        global_aggregation (`bool`, *optional*, defaults to `True`): Run a GRU over the summaries of all encoder
            layers (Eq. 10). `False`: read only the top layer.
        global_gate (`bool`, *optional*, defaults to `True`): Gate the vector for every target word (Eqs. 11-13).
        num_capsules (`int`, *optional*, defaults to 32): K.
        routing_iterations (`int`, *optional*, defaults to 3): r.
        capsule_dim (`int`, *optional*): c, the width of a capsule. `None`: `d_model // encoder_attention_heads`, which
            is 64 at base and big size; `d_model` with `capsule_projection="shared"`.
        capsule_projection (`str`, *optional*, defaults to `"per_capsule"`): `"per_capsule"`: a matrix W_k for each
            capsule, the same for all layers. `"shared"`: one for all capsules, which are then always equal.
        routing_softmax_axis (`str`, *optional*, defaults to `"positions"`): Each capsule divides its attention among
            the words (`"positions"`, algorithm 1), or each word among the `"capsules"` (Sabour et al., 2017).
        capsule_pooling (`str`, *optional*, defaults to `"attentive"`): Combination of a layer's capsules:
            `"attentive"` (Eqs. 7-9), their `"mean"`, or `"concat"`; each followed by the two-layer network of Eq. 7.
        global_ffn_dim (`int`, *optional*): Inner width of the networks of Eqs. 7 and 9. `None`: `d_model`.
        global_gate_type (`str`, *optional*, defaults to `"vector"`): `"vector"`: `W [r; s] + b`, a gate for each
            channel. `"scalar"`: one for each target word. `"sum"`: `W (r + s) + b`, a gate for each channel.
    """

    model_type = "gret"

    use_global_state: bool = True
    global_capsule: bool = True
    global_aggregation: bool = True
    global_gate: bool = True
    # Larger numbers are mistakes: the largest of the paper's figure 4 are 64 and 5.
    num_capsules: int = interval(1, 65_536)(32)
    routing_iterations: int = interval(1, 100)(3)
    capsule_dim: Filled[int] = size(DERIVED)
    capsule_projection: Literal["per_capsule", "shared"] = "per_capsule"
    routing_softmax_axis: Literal["positions", "capsules"] = "positions"
    capsule_pooling: Literal["attentive", "mean", "concat"] = "attentive"
    global_ffn_dim: Filled[int] = size(DERIVED)
    global_gate_type: Literal["vector", "scalar", "sum"] = "vector"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.capsule_dim is None:
            heads = 1 if self.capsule_projection == "shared" else self.encoder_attention_heads
            self.capsule_dim = max(self.d_model // heads, 1)
        if self.global_ffn_dim is None:
            self.global_ffn_dim = self.d_model
        super().__post_init__(**kwargs)

    def baseline(self) -> NMTTransformerConfig | None:
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig)) if self.use_global_state else None
