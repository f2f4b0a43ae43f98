"""Configuration of the Transformer toy with a recurrent input."""

from .configuration_nmt_transformer import NMTTransformerConfig


class InputToyConfig(NMTTransformerConfig):
    model_type = "input_toy"

    cell: str = "gru"

    def cache_layer_types(self) -> list[str]:
        return ["recnmt_recurrent_attention"] + ["full_attention"] * (self.decoder_layers - 1)


InputToyConfig.register_for_auto_class()
