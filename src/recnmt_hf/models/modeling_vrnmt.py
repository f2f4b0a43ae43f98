"""
Recurrent encoder-decoder with latent variables in the decoder (VRNMT; Su et al., 2018, "Variational Recurrent Neural
Machine Translation", AAAI), and with one for each sentence (VNMT; Zhang et al., 2016, "Variational Neural Machine
Translation", EMNLP).

Encoder, attention and read-out are those of RNMT. With q_j the state that drives the attention, y target words and a_j
the context (prior, posterior and sample, for each target word):

    p_j = tanh(W_p [q_j; y_{j-1}; a_j] + b_p),        mu'_j = W_mu' p_j + b,  v'_j = W_v' p_j + b       v = log sigma^2
    r_j = tanh(W_r [q_j; y_{j-1}; a_j; y_j] + b_r),   mu_j = W_mu r_j + b,    v_j = W_v r_j + b
    z_j = mu_j + exp(v_j / 2) e_j,  e_j ~ N(0, I), in training;   z_j = mu'_j otherwise
    u_j = tanh(W_z z_j + b_z)
    RNNsearch    s_j = GRU([y_{j-1}; a_j; u_j], s_{j-1})
    RNNsearch*   s_j = GRU([a_j; u_j], s~_j)
    loss = sum_j -log p(y_j) + beta KL(q_j || p_j)
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils import can_return_tuple, logging

from .configuration_vrnmt import VRNMTConfig
from .decoder_cache import cached_vector, spread_over_beams
from .kernels_attentional_steps import gru_step, run_steps
from .kernels_cpu_matmuls import fast_linear, project
from .kernels_shared import Mask, is_plain, wide_type
from .kernels_vrnmt import LatentPart, LatentWeights, clamped, draw
from .modeling_rnmt import DecoderRecurrence, RNMTDecoder, RNMTEncoder, RNMTPreTrainedModel, run_steps_reference
from .recurrent_layers import MaskedRNN, masked_mean
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Initialization, WarmStartReport
from .seq2seq_loss import IGNORE_INDEX, divisor
from .seq2seq_outputs import Memories, Memory, Seq2SeqDecoderOutput, Seq2SeqTranslationOutput
from .user_errors import UserError


# Mean KL divergence of a target word, in nats, below which the latent variables carry no information.
COLLAPSED = 0.01

Moments = tuple[Tensor, Tensor]  # mean and log-variance
logger = logging.get_logger(__name__)


@dataclass
class VRNMTDecoderOutput(Seq2SeqDecoderOutput):
    """
    Output of the decoder.

    Args:
        kl (`torch.Tensor` of shape `()`, *optional*): In training with labels: KL divergence of posterior and prior, in
            nats for each target word, without weight and free bits.
        kl_terms (`torch.Tensor` of shape `(batch_size, target_length)` or `(batch_size, 1)`, *optional*): The
            divergence of each latent variable, 0 for padding.
    """

    kl: Tensor | None = None
    kl_terms: Tensor | None = None


class LatentNetwork(nn.Module):
    """A diagonal Gaussian from a tanh layer: `h = tanh(W [x; ..] + b)`, mean `W_mu h + b`, log-variance `W_v h + b`."""

    read_layers: tuple[str, ...] = ("hidden", "mean", "log_variance")

    def __init__(self, input_size: int, hidden_size: int, latent_size: int):
        super().__init__()
        self.hidden = nn.Linear(input_size, hidden_size)
        self.mean = nn.Linear(hidden_size, latent_size)
        self.log_variance = nn.Linear(hidden_size, latent_size)

    def forward(self, *parts: Tensor) -> Moments:
        """Return mean and log-variance `(.., latent_size)` for inputs `(.., size)`, which are concatenated."""
        return self.moments(torch.tanh(project(self.hidden, torch.cat(parts, dim=-1))))

    def moments(self, hidden: Tensor) -> Moments:
        """Return mean and log-variance for the tanh layer `(.., hidden_size)`."""
        return project(self.mean, hidden), clamped(project(self.log_variance, hidden))

    def is_plain(self) -> bool:
        """Return whether parameters may be read instead of calling the modules."""
        layers = map(self.get_submodule, self.read_layers)
        return is_plain(self, LatentNetwork) and all(is_plain(layer, nn.Linear) for layer in layers)


def sample(moments: Moments, noise: Tensor | None) -> Tensor:
    """Return `z = mean + exp(v / 2) noise`, or the mean without noise."""
    return moments[0] if noise is None else draw(torch.cat(moments, dim=-1), noise.to(moments[0].dtype))


def gaussian_kl(posterior: Moments, prior: Moments | None) -> Tensor:
    """
    Return the KL divergence of two diagonal Gaussians `(.., latent_size)`, in nats and at least float32; without a
    prior that from N(0, I): `1/2 sum(v' - v + (exp(v) + (mu - mu')^2) / exp(v') - 1)`.
    """
    wide = wide_type(posterior[0].dtype)
    mean, log_variance = (part.to(wide) for part in posterior)
    if prior is None:
        terms = log_variance.exp() + mean.square() - log_variance - 1
    else:
        other, other_log_variance = (part.to(wide) for part in prior)
        spread = log_variance.exp() + (mean - other).square()
        terms = other_log_variance - log_variance + spread * (-other_log_variance).exp() - 1
    return terms.sum(dim=-1) / 2


class SentenceLatent(nn.Module):
    """
    A latent variable for each sentence (Zhang et al., 2016). With h the mean annotation and y the mean of a
    bidirectional GRU over the target: `p = tanh(W_p h + b)`, `r = tanh(W_r [h; y] + b)`.
    """

    def __init__(self, config: VRNMTConfig):
        super().__init__()
        sizes = config.latent_hidden_size, config.latent_size
        width, annotation = config.d_model, config.annotation_size
        self.prior = LatentNetwork(annotation, *sizes) if config.latent_prior == "learned" else None
        self.posterior = LatentNetwork(annotation + 2 * width, *sizes)
        self.target_rnn = MaskedRNN("gru", width, width, bidirectional=True)

    def mean(self, memory: Memory, latent_size: int) -> Tensor:
        """Return the prior's mean `(num_sources, latent_size)` for the annotations."""
        if self.prior is None:
            return memory.states.new_zeros(memory.states.shape[0], latent_size)
        return self.prior(masked_mean(memory.states, memory.token_mask))[0]

    def forward(self, source: Tensor, targets: Tensor, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return z `(batch_size, latent_size)` of the posterior and its KL divergence, for mean annotations."""
        prior = None if self.prior is None else self.prior(source)
        posterior = self.posterior(source, masked_mean(self.target_rnn(targets, real)[0], real))
        return sample(posterior, noise), gaussian_kl(posterior, prior)


class LatentGRUCell(nn.GRUCell):
    """A GRU cell with a further part of its gates' input, `(batch_size, 3 * hidden_size)`."""

    def forward(  # type: ignore[override]  # a third input
        self, inputs: Tensor, state: Tensor, gates: Tensor
    ) -> Tensor:
        total = nn.functional.linear(inputs, self.weight_ih, self.bias_ih) + gates
        recurrent = nn.functional.linear(state, self.weight_hh, self.bias_hh)
        return gru_step(total.to(state.dtype), recurrent.to(state.dtype), state)[0]


class VRNMTRecurrence(DecoderRecurrence):
    """
    The decoder's recurrence with attention and latent variables. The second GRU's input matrix is that of RNMT, with
    the additional columns of u_j in `latent_gates`, so that a baseline's parameters keep their names and shapes. The
    steps run as [`run_steps`] with [`LatentPart`] on projected annotations, or as [`run_steps_reference`].
    """

    context_cell_class = LatentGRUCell
    read_layers = (*DecoderRecurrence.read_layers, "latent", "latent_gates")

    def __init__(self, config: VRNMTConfig):
        super().__init__(config)
        width, annotation = config.d_model, config.annotation_size
        sizes = config.latent_hidden_size, config.latent_size
        self.prior = self.posterior = None
        if config.latent_level == "word":
            self.posterior = LatentNetwork(3 * width + annotation, *sizes)
            if config.latent_prior == "learned":
                self.prior = LatentNetwork(2 * width + annotation, *sizes)
        self.blocks = width, width, annotation  # of the columns of hidden layers: q_j, y_{j-1}, a_j; then y_j
        self.latent = nn.Linear(config.latent_size, width)
        self.latent_gates = nn.Linear(width, 3 * width, bias=False)
        self.latent_readout = nn.Linear(width, self.readout.size, bias=False) if config.latent_readout else None

    def is_fast(self) -> bool:
        networks = [network for network in (self.prior, self.posterior) if network is not None]
        return super().is_fast() and all(network.is_plain() for network in networks)

    def columns(self, network: LatentNetwork) -> tuple[Tensor, ...]:
        """Return the columns of a hidden layer's matrix for q_j, y_{j-1}, a_j and y_j."""
        weight = network.hidden.weight
        return weight.split([*self.blocks, weight.shape[1] - sum(self.blocks)], dim=1)

    def project_latent_memory(self, has_targets: bool, annotations: Tensor) -> tuple[Tensor, Tensor]:
        """
        Project the annotations for all steps, as [`project_memory`] does, with the hidden layers' parts `W h_i` among
        the values: after the gates that of the network in the loop, at the end that of the prior for the KL divergence.
        """
        keys, values = self.project_memory(annotations)
        networks = [self.posterior, self.prior] if has_targets else [self.prior]
        parts = [
            None if network is None else fast_linear(annotations, self.columns(network)[2])[:, None].to(values.dtype)
            for network in networks
        ]
        gates, readout = values.split([3 * self.blocks[0], self.readout.size], dim=-1)
        ordered = gates, parts[0], readout, *parts[1:]
        return keys, torch.cat([part for part in ordered if part is not None], dim=-1)

    def forward(  # type: ignore[override]  # further inputs
        self,
        words: Tensor,
        keys: Tensor,
        values: Tensor | None,
        visible: Mask,
        state: Tensor,
        token_mask: Mask,
        targets: Tensor | None,
        noise: Tensor | None,
        given: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """
        Run as [`DecoderRecurrence`], with the target words y_j of the posterior, `(batch_size, target_length, d_model)`
        or `None` for the prior, and noise `(batch_size, target_length, latent_size)` or `None` for the mean. `given`
        are latent variables known before the steps. With target words, return also the KL divergence of each step.
        """
        if values is None:
            rest = visible, state, token_mask, targets, noise, given
            states, weights, contexts, latents, *terms = run_steps_reference(self, words, keys, *rest)
            features = self.read_out(states, words, self.readout.context_proj(contexts), latents)
            return states, weights, features, terms[0] if terms else None
        keys, values, dtype = keys[:, 0], values[:, 0], self.context_cell.weight_hh.dtype
        network = self.prior if targets is None else self.posterior
        start = 3 * state.shape[-1]  # of the values that are read after the steps
        if given is not None:
            latents = torch.tanh(project(self.latent, given))
            inputs = project(self.latent_gates, latents).expand(-1, words.shape[1], -1)
            network, noise = None, None
        else:
            inputs = self.word_part(network, words, targets)
            start += inputs.shape[-1]
        states, attention, *results = run_steps(
            self,
            words,
            *(keys, values[..., :start], visible, state, token_mask),
            inputs.transpose(0, 1).to(dtype),
            None if noise is None else noise.transpose(0, 1).to(dtype),
            *LatentWeights.of(self, network, draws=noise is not None),
            further=LatentPart,
        )
        # What is read from the annotations after the steps, from weights in rows of their source.
        grouped = attention[:, 0].reshape(keys.shape[0], -1, keys.shape[1])
        reads = torch.matmul(grouped.to(values.dtype), values[..., start:]).view(*words.shape[:2], -1)
        features, kl = reads[..., : self.readout.size], None
        if given is None:
            queries, moments, latents = results
        if targets is not None and given is None:
            prior = None
            if self.prior is not None:
                hidden = fast_linear(queries, self.columns(self.prior)[0]) + self.word_part(self.prior, words)
                prior = self.prior.moments(torch.tanh(hidden + reads[..., self.readout.size :]))
            mean, log_variance = moments.chunk(2, dim=-1)
            kl = gaussian_kl((mean, clamped(log_variance)), prior)
        return states, attention, self.read_out(states, words, features, latents), kl

    def read_out(self, states: Tensor, words: Tensor, contexts: Tensor, latents: Tensor) -> Tensor:
        """Return the read-out from `W_c a_j` and u_j."""
        if self.latent_readout is not None:
            contexts = contexts + project(self.latent_readout, latents)
        return self.readout(states, words, contexts)

    def further_part(self, j: int, query: Tensor, word: Tensor, context: Tensor, *further: Tensor | None) -> Any:
        """Return u_j's part of the gates; u_j, and the KL divergence if there are target words."""
        targets, noise, given = further
        divergence: tuple[Tensor, ...] = ()
        if given is not None:
            value = given[:, min(j, given.shape[1] - 1)]
        else:
            moments = prior = None if self.prior is None else self.prior(query, word, context)
            if targets is not None and self.posterior is not None:
                moments = self.posterior(query, word, context, targets[:, j])
                divergence = (gaussian_kl(moments, prior),)
            assert moments is not None
            value = sample(moments, None if noise is None else noise[:, j])
        latent = torch.tanh(self.latent(value))
        return (self.latent_gates(latent),), (latent, *divergence)

    def word_part(self, network: Any, words: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the words' part of a network's hidden layer, `(batch_size, target_length, latent_hidden_size)`."""
        _, of_words, _, of_targets = self.columns(network)
        part = fast_linear(words, of_words, network.hidden.bias)
        return part if targets is None else part + fast_linear(targets, of_targets)


class VRNMTPreTrainedModel(RNMTPreTrainedModel):
    """Base class of the VRNMT models: configuration, initialization and loading."""

    config: VRNMTConfig


class VRNMTDecoder(VRNMTPreTrainedModel, RNMTDecoder):
    """RNMT's decoder with latent variables; from the labels `target_ids` they are drawn from the posterior."""

    output_class = VRNMTDecoderOutput
    recurrence_class = VRNMTRecurrence
    recurrence: VRNMTRecurrence

    def __init__(self, config: VRNMTConfig):
        super().__init__(config)
        self.sentence_latent = SentenceLatent(config) if config.latent_level == "sentence" else None
        self.post_init()

    @can_return_tuple
    def forward(self, *args: Any, **kwargs: Any) -> VRNMTDecoderOutput:
        """Args as for [`Seq2SeqDecoder`], and `target_ids` `(batch_size, target_length)`, -100 at padding."""
        terms: list[Tensor] = []
        is_training = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if is_training and kwargs.get("target_ids") is None:
            logger.warning_once(
                "Training without labels, so without posterior and KL divergence. With Seq2SeqTrainer, set "
                "label_smoothing_factor=0; TranslationTrainer supports label smoothing."
            )
        outputs = super().forward(*args, **{**kwargs, "return_dict": True, "kl_terms": terms})
        if terms:
            outputs.kl_terms = terms[0]
            outputs.kl = terms[0].sum() / (kwargs["target_ids"] != IGNORE_INDEX).sum().clamp(min=1)
        return outputs

    def run(  # type: ignore[override]  # further inputs
        self,
        words: Tensor,
        _: Any,
        token_mask: Mask,
        memories: Memories,
        cache: Cache | None,
        kl_terms: list[Tensor],
        target_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> list[Tensor]:
        """Run the recurrence; append the KL divergences to `kl_terms` if there are target words."""
        rows, size, memory = words.shape[0], self.config.latent_size, memories["encoder"]
        real = targets = given = None
        if target_ids is not None:
            real = target_ids != IGNORE_INDEX
            targets = self.embeddings(target_ids.masked_fill(~real, self.config.pad_token_id or 0), None)
            targets = self.embed_input(targets)
            if self.config.latent_word_dropout:
                kept = torch.rand(words.shape[:2], device=words.device) >= self.config.latent_word_dropout
                words = words * kept[:, :, None].to(words.dtype)
        noise = self.draw_noise(words, targets is not None)
        # Latent variables that do not depend on the decoder's states.
        if self.sentence_latent is None:
            if self.config.latent_prior == "standard" and targets is None:
                given = words.new_zeros(rows, 1, size) if noise is None else noise.to(words.dtype)
        elif targets is None:
            mean = functools.partial(self.sentence_latent.mean, memory, size)
            given = cached_vector(cache, "latent", mean, rows)[:, None]
        else:
            assert noise is not None and real is not None
            source = spread_over_beams(masked_mean(memory.states, memory.token_mask), rows)
            latent, kl = self.sentence_latent(source, targets, real, noise[:, 0])
            given = latent[:, None]
            kl_terms.append(kl.masked_fill(~real.any(dim=1), 0.0)[:, None])
        compute = functools.partial(self.recurrence.project_latent_memory, targets is not None)
        stored = cache if targets is None else None
        states, features, terms = self.advance(words, token_mask, memory, cache, compute, stored, targets, noise, given)
        if terms is not None and real is not None:
            kl_terms.append(terms.masked_fill(~real, 0.0))
        return [words, states, features]

    def draw_noise(self, words: Tensor, has_targets: bool) -> Tensor | None:
        """Draw the noise of latent variables, `(batch_size, target_length or 1, latent_size)`; `None`: their mean."""
        # Before the steps, so that all paths, and checkpoints of gradients, have the same.
        if not has_targets and self.config.latent_inference == "mean":
            return None
        steps = words.shape[1] if self.sentence_latent is None else 1
        shape = words.shape[0], steps, self.config.latent_size
        return torch.randn(shape, dtype=wide_type(words.dtype), device=words.device)


class VRNMTModel(VRNMTPreTrainedModel, Seq2SeqModelBase):
    """VRNMT or VNMT without the output matrix."""

    encoder_class = RNMTEncoder
    decoder_class = VRNMTDecoder
    training_step: Tensor

    def __init__(self, config: VRNMTConfig):
        super().__init__(config)
        # A tensor, since compiled graphs would be compiled again for every number; -1: no trainer reports the step.
        self.register_buffer("training_step", torch.tensor(-1), persistent=False)

    def initialize(self, start: Initialization) -> None:
        init.constant_(self.training_step, -1)


class VRNMTForConditionalGeneration(VRNMTPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    """
    VRNMT or VNMT with its output matrix: `generate` translates, `labels` train. In training the loss includes the KL
    divergence, whose weight rises during the first `kl_annealing_steps` if the trainer calls [`set_training_step`].
    """

    model_class = VRNMTModel
    # Fields of the output, means over the target words, that trainers log.
    logged_outputs = ("kl",)

    def set_training_step(self, step: int) -> None:
        """Set the number of training steps made so far, on which the weight of the KL divergence depends."""
        self.model.training_step.fill_(step)

    def current_kl_weight(self) -> Tensor | float:
        """Return the weight of the KL divergence at the current training step."""
        steps, weight = self.config.kl_annealing_steps, self.config.kl_weight
        if steps == 0:
            return weight
        step: Any = self.model.training_step
        share = torch.where(step < 0, 1.0, step / steps)
        return weight * share.clamp(max=1.0)

    def training_warning(self, means: dict[str, float]) -> str | None:
        """Return a warning if the logged means of `logged_outputs` show that training fails, or `None`."""
        annealed = not 0 <= int(self.model.training_step) < self.config.kl_annealing_steps
        if not annealed or means["kl"] >= COLLAPSED:
            return None
        return (
            f"the latent variables are not used: their KL divergence is {means['kl']:.4f} nats per target word "
            "(posterior collapse). Start from a trained baseline, or set kl_annealing_steps, latent_free_bits or "
            "latent_word_dropout to a larger value"
        )

    def inputs_from_labels(self, labels: Tensor) -> dict[str, Any]:
        # The posterior is used in training only: validation must not see the words that it predicts.
        return {"target_ids": labels} if self.training else {}

    def auxiliary_loss(
        self, outputs: Seq2SeqTranslationOutput, labels: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor | None:
        terms: Tensor | None = outputs.kl_terms  # type: ignore[attr-defined]
        if terms is None:
            return None
        if self.config.latent_free_bits:
            real = labels != IGNORE_INDEX
            real = real if terms.shape[1] == real.shape[1] else real.any(dim=1, keepdim=True)
            terms = terms.clamp(min=self.config.latent_free_bits) * real
        return self.current_kl_weight() * terms.sum() / divisor(labels, num_items_in_batch)

    def init_from_baseline(self, baseline: str | Path | PreTrainedModel) -> WarmStartReport:
        """
        Copy the parameters of a trained baseline. After a start from RNNsearch or RNNsearch* the model computes the
        baseline's logits: the matrices that read the latent variables are then zero.
        """
        report = super().init_from_baseline(baseline)
        recurrence = self.model.decoder.recurrence
        name = "model.decoder.recurrence.latent_gates.weight"
        if "model.decoder.recurrence.context_cell.weight_hh" in report.copied and name in report.fresh:
            with torch.no_grad():
                for linear in (recurrence.latent_gates, recurrence.latent_readout):
                    if linear is not None:
                        linear.weight.zero_()
        return report

    def check_beams(self, beams: int, field: str = "num_beams") -> None:
        """Raise `UserError` for a number of beams that the model does not support."""
        if beams > 1 and self.config.random_field is not None:
            raise UserError(
                f"{field}={beams} is not allowed with latent_inference='sample', since beams of different samples are "
                "not comparable. Use one beam, or set latent_inference='mean' in the configuration.",
                field=field,
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as [`GenerationMixin`]; beam search raises a `UserError` with `latent_inference="sample"`."""
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        choices = (kwargs.get("num_beams"), getattr(given, "num_beams", None), self.generation_config.num_beams)
        beams = next((beams for beams in choices if beams is not None), 1)
        self.check_beams(beams)
        return super().generate(*args, **kwargs)


__all__ = ["VRNMTForConditionalGeneration", "VRNMTModel", "VRNMTPreTrainedModel"]
