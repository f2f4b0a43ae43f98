"""Configuration of the recurrent encoder-decoder with latent variables in the decoder."""

from typing import Any, ClassVar, Literal

from .configuration_rnmt import RNMTConfig
from .configuration_seq2seq import DERIVED, Filled, any_layers, any_size, interval, probability, size, strict_config


@strict_config
class VRNMTConfig(RNMTConfig):
    r"""
    Configuration of [`VRNMTModel`], a recurrent encoder-decoder whose decoder reads a Gaussian latent variable at every
    step (VRNMT, Su et al., 2018, "Variational Recurrent Neural Machine Translation"), or one for each sentence (VNMT,
    Zhang et al., 2016, "Variational Neural Machine Translation").

    All fields of [`RNMTConfig`], with the defaults `relation_layers=0` and `readout_dropout=0.3`, and:

    Args:
        latent_size (`int`, *optional*): l, the size of a latent variable. `None`: `d_model`.
        latent_hidden_size (`int`, *optional*): g, the width of hidden layers of prior and posterior. `None`: `d_model`.
        latent_level (`str`, *optional*, defaults to `"word"`): A latent variable for each target word (VRNMT), or for
            each `"sentence"` (VNMT).
        latent_prior (`str`, *optional*, defaults to `"learned"`): Prior: a network, or `"standard"`, N(0, I).
        latent_readout (`bool`, *optional*, defaults to `False`): The read-out reads the latent variable too.
        latent_inference (`str`, *optional*, defaults to `"mean"`): Outside of training, use the mean of the prior, or
            draw a `"sample"` for each word. Beam search needs `"mean"`.
        kl_weight (`float`, *optional*, defaults to 1.0): Weight of the KL divergence in the loss, after annealing.
        kl_annealing_steps (`int`, *optional*, defaults to 2000): The weight rises linearly from 0 to `kl_weight` during
            these training steps, if the trainer calls `set_training_step`. Otherwise it is constant.
        latent_free_bits (`float`, *optional*, defaults to 0): Nats; a smaller KL divergence of a latent variable counts
            as this constant in the loss (Kingma et al., 2016).
        latent_word_dropout (`float`, *optional*, defaults to 0): Share of input words that are zeros in training.
    """

    model_type = "vrnmt"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"d_model": 128, "readout_dropout": 0.1},
        "small": {"d_model": 256},
        "base": {},  # as the next two: the sizes of RNMT's paper, whose table 1 contains VRNMT
        "en_de": {},
        "zh_en": {},
        "big": {"d_model": 1024},
    }
    baseline_first: ClassVar[str | None] = (
        "a VRNMT trained from scratch may learn poorly; the authors' code of its predecessor VNMT starts from a "
        "trained RNNsearch"
    )

    readout_dropout: float | int = probability(0.3)
    relation_layers: Filled[int] = any_layers(0)
    latent_size: Filled[int] = size(DERIVED)
    latent_hidden_size: Filled[int] = size(DERIVED)
    latent_level: Literal["word", "sentence"] = "word"
    latent_prior: Literal["learned", "standard"] = "learned"
    latent_readout: bool = False
    latent_inference: Literal["mean", "sample"] = "mean"
    kl_weight: float | int = interval(0, 1e6)(1.0)
    kl_annealing_steps: int = any_size(2000)
    latent_free_bits: float | int = interval(0, 1e6)(0.0)
    latent_word_dropout: float | int = probability(0.0)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.latent_size is None:
            self.latent_size = self.d_model
        if self.latent_hidden_size is None:
            self.latent_hidden_size = self.d_model
        super().__post_init__(**kwargs)

    @property
    def random_field(self) -> str | None:
        return "latent_inference" if self.latent_inference == "sample" else None

    def baseline(self) -> RNMTConfig:
        return RNMTConfig(**self.fields_of(RNMTConfig))

    def check_values(self) -> None:
        super().check_values()
        # A sample would have to be the same in all steps of a sentence.
        is_drawn = self.latent_inference == "sample" and self.latent_level == "sentence"
        self.require(not is_drawn, "latent_inference", "'mean'", "latent_level")
