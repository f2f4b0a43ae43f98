"""Configuration of the toy with a gated vector for each source."""

from .configuration_nmt_transformer import NMTTransformerConfig


class GateToyConfig(NMTTransformerConfig):
    model_type = "gate_toy"


GateToyConfig.register_for_auto_class()
