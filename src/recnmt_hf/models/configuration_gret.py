"""Configuration of the Transformer with a global representation of the source."""

from typing import Any

from transformers.utils import logging

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import FROM_OTHERS, Filled


logger = logging.get_logger(__name__)

# More are a digit too many: the largest of the paper's figure 4 are 64 and 5.
MOST_CAPSULES, MOST_ITERATIONS = 65_536, 100


class GRETConfig(NMTTransformerConfig):
    r"""
    Configuration of [`GRETModel`], the Transformer whose decoder also gets one vector of the whole source sentence,
    made of all encoder layers (Weng et al., 2020, "GRET: Global Representation Enhanced Transformer"). All fields of
    [`NMTTransformerConfig`], and:

    Args:
        use_global_state (`bool`, *optional*, defaults to `True`):
            `False`: none of it, the plain Transformer.
        global_capsule (`bool`, *optional*, defaults to `True`):
            Whether a layer is summed up by capsules with dynamic routing (Eqs. 2-6); else by the mean of its words.
        global_aggregation (`bool`, *optional*, defaults to `True`):
            Whether all encoder layers are summed up and a GRU runs over them (Eq. 10); else the top layer alone.
        global_gate (`bool`, *optional*, defaults to `True`):
            Whether a gate says for every target word how much of the vector it gets (Eqs. 11-13); else all of it.
        num_capsules (`int`, *optional*, defaults to 32):
            K.
        routing_iterations (`int`, *optional*, defaults to 3):
            r.
        capsule_dim (`int`, *optional*):
            c, the width of a capsule. `None`: `d_model // encoder_attention_heads`, which is 64 at base and big size;
            `d_model` with `capsule_projection="shared"`.
        capsule_projection (`str`, *optional*, defaults to `"per_capsule"`):
            `"per_capsule"`: a matrix W_k for each capsule, the same for all layers. `"shared"`: one for all capsules,
            which then are all equal whatever the data are.
        routing_softmax_axis (`str`, *optional*, defaults to `"positions"`):
            Each capsule divides its attention among the words (`"positions"`, the paper's algorithm 1), or each word
            among the `"capsules"` (Sabour et al., 2017).
        capsule_pooling (`str`, *optional*, defaults to `"attentive"`):
            How the capsules of a layer become one vector: `"attentive"` (Eqs. 7-9), their `"mean"`, or `"concat"`;
            each followed by the two-layer network of Eq. 7.
        global_ffn_dim (`int`, *optional*):
            Inner width of the networks of Eqs. 7 and 9. `None`: `d_model`.
        global_gate_type (`str`, *optional*, defaults to `"vector"`):
            `"vector"`: `W [r; s] + b`, a gate for each channel. `"scalar"`: one for each target word. `"sum"`:
            `W (r + s) + b`, a gate for each channel with half of the parameters.

    Example:

    ```python
    >>> from recnmt_hf import GRETConfig, GRETForConditionalGeneration
    >>> config = GRETConfig.from_preset("tiny", vocab_size=1000, num_capsules=8)
    >>> GRETForConditionalGeneration(config).config.capsule_dim
    32

    ```
    """

    model_type = "gret"

    use_global_state: bool = True
    global_capsule: bool = True
    global_aggregation: bool = True
    global_gate: bool = True
    num_capsules: int = 32
    routing_iterations: int = 3
    capsule_dim: Filled[int] = FROM_OTHERS
    capsule_projection: str = "per_capsule"
    routing_softmax_axis: str = "positions"
    capsule_pooling: str = "attentive"
    global_ffn_dim: Filled[int] = FROM_OTHERS
    global_gate_type: str = "vector"

    def __post_init__(self, **kwargs: Any) -> None:
        width, heads = self.d_model, self.encoder_attention_heads
        if isinstance(width, int) and isinstance(heads, int) and heads > 0:
            if self.capsule_dim is None:
                self.capsule_dim = width if self.capsule_projection == "shared" else max(width // heads, 1)
            if self.global_ffn_dim is None:
                self.global_ffn_dim = width
        super().__post_init__(**kwargs)

    def baseline(self) -> NMTTransformerConfig | None:
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig)) if self.use_global_state else None

    def check_values(self) -> None:
        super().check_values()
        self.check_flag("use_global_state", "global_capsule", "global_aggregation", "global_gate")
        self.check_whole("num_capsules", maximum=MOST_CAPSULES)
        self.check_whole("routing_iterations", maximum=MOST_ITERATIONS)
        self.check_whole("capsule_dim", "global_ffn_dim")
        self.check_choice("capsule_projection", ("per_capsule", "shared"))
        self.check_choice("routing_softmax_axis", ("positions", "capsules"))
        self.check_choice("capsule_pooling", ("attentive", "mean", "concat"))
        self.check_choice("global_gate_type", ("vector", "scalar", "sum"))
        if self.use_global_state and self.global_capsule and self.capsule_projection == "shared":
            logger.warning_once(
                'capsule_projection="shared": all capsules get the same votes and stay equal, so that num_capsules has '
                'no effect. Remedy: use "per_capsule", unless this reading of the paper is what you want to see.'
            )


GRETConfig.register_for_auto_class()
