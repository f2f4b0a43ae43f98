"""Configuration of the recurrent toy."""

from .configuration_seq2seq import Seq2SeqConfig


class GRUToyConfig(Seq2SeqConfig):
    model_type = "gru_toy"

    normalize_before: bool = False
    layer_norm_eps: float = 1e-5
    decoder_layers: int = 1
    decoder_attention_heads: int = 4

    def cache_layer_types(self) -> list[str]:
        return ["recnmt_recurrent"]


GRUToyConfig.register_for_auto_class()
