#!/usr/bin/env python
"""
Time of every fast path relative to its reference on this CPU; both alternate.

    python scripts/benchmarks/fast_paths.py --size base --train-batch-size 16 --generate-batch-size 1
"""

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring import PathTiming, make_parser, print_setup, run_script, time_in_turns
from torch import nn

from recnmt_hf.models import kernels_cpu_matmuls, kernels_shared


@dataclass
class Case:
    """A fast path, its reference, and whether a model uses the fast path."""

    path: str
    shape: str
    fast: Callable[[], Any]
    reference: Callable[[], Any]
    taken: bool
    trains: bool


def backwards(outputs: Any) -> None:
    """Run the backward pass from the sum of all outputs that require gradients."""
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    torch.stack(
        [tensor.float().sum() for tensor in tensors if tensor is not None and tensor.requires_grad]
    ).sum().backward()


def sentences(batch_size: int, length: int) -> torch.Tensor:
    """Return a mask `(batch_size, length)` of sentences from half to full length."""
    lengths = torch.linspace(length, length / 2, batch_size).round().long()
    return (torch.arange(length)[None, :] < lengths[:, None]).long()


def dropout_cases(config: Any, batch_size: int, length: int) -> Iterator[Case]:
    states = torch.randn(batch_size * length, config.d_model, requires_grad=True)
    yield Case(
        "dropout",
        f"{batch_size * length} x {config.d_model}",
        lambda: kernels_shared.dropout(states, 0.1, True),
        lambda: nn.functional.dropout(states, 0.1, True),
        kernels_shared.enabled() and states.numel() >= kernels_shared.SMALLEST_DROPOUT,
        True,
    )


def matmul_cases(config: Any, batch_size: int, length: int) -> Iterator[Case]:
    if not kernels_cpu_matmuls.has_onednn():
        return
    for rows in (batch_size, batch_size * length):  # of a step of a recurrence, and of all words
        states = torch.randn(rows, config.d_model, requires_grad=True)
        weight = torch.randn(config.encoder_ffn_dim, config.d_model, requires_grad=True)
        bias = torch.randn(config.encoder_ffn_dim, requires_grad=True)
        yield Case(
            "linear layer by oneDNN in float32",
            f"{rows} x {config.d_model} to {config.encoder_ffn_dim}",
            partial(kernels_cpu_matmuls.OneDNNLinear.apply, states, weight, bias),
            partial(nn.functional.linear, states, weight, bias),
            kernels_cpu_matmuls.takes_onednn(states, weight),
            True,
        )


def packed_matmul_cases(config: Any, rows: int) -> Iterator[Case]:
    """Layers of a decoding step, and its output layer."""
    if not kernels_cpu_matmuls.has_onednn():
        return
    types = [torch.float32] + [torch.bfloat16] * kernels_shared.has_bfloat16()
    for dtype, channels in itertools.product(types, (config.d_model, config.decoder_ffn_dim, config.vocab_size)):
        states, layer = torch.randn(rows, config.d_model, dtype=dtype), nn.Linear(config.d_model, channels, dtype=dtype)
        packed = kernels_cpu_matmuls.PackedWeight()
        with torch.no_grad():
            taken = kernels_shared.allowed() and packed.suits(layer, states)
        yield Case(
            "packed weight",
            f"{rows} x {config.d_model} to {channels}, {str(dtype).removeprefix('torch.')}",
            partial(packed.multiply, layer, states),
            partial(nn.functional.linear, states, layer.weight, layer.bias),
            taken,
            False,
        )


def attention_cases(config: Any, batch_size: int, length: int, beams: int) -> Iterator[Case]:
    """Attention in training with and without dropout, and of a decoding step to half as many keys."""
    from recnmt_hf.models.attention import eager_attention_forward

    module: Any = nn.Module()
    module.is_causal = False
    heads, types = config.encoder_attention_heads, (torch.float32, torch.bfloat16)
    for dtype, (trains, dropout) in itertools.product(types, ((True, 0.1), (True, 0.0), (False, 0.0))):
        keys, queries = (length, length) if trains else (length // 2, beams)
        mask = sentences(batch_size, keys)[:, None, None, :].bool()
        inputs = [
            torch.randn(batch_size, heads, count, config.d_model // heads).to(dtype).requires_grad_(trains)
            for count in (queries, keys, keys)
        ]

        def plain(inputs: Any = inputs, mask: Any = mask, dropout: float = dropout) -> torch.Tensor:
            return eager_attention_forward(module, *inputs, mask, inputs[0].shape[3] ** -0.5, dropout)[0]

        def fused(inputs: Any = inputs, mask: Any = mask, dropout: float = dropout) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(*inputs, mask, dropout)

        with torch.set_grad_enabled(trains):
            taken = kernels_shared.prefers_plain_matmuls(inputs[0], inputs[1], dropout)
        kind = f"dropout {dropout}" if trains else f"step of {beams} beams, {keys} keys"
        shape = f"{batch_size} x {length}, {str(dtype).removeprefix('torch.')}, {kind}"
        yield Case("plain matmuls for sdpa", shape, plain, fused, taken, trains)


def loss_cases(config: Any, batch_size: int, length: int) -> Iterator[Case]:
    from recnmt_hf.models.seq2seq_loss import chunked_cross_entropy, smoothed_cross_entropy

    states = torch.randn(batch_size * length, config.d_model, requires_grad=True)
    weight = (torch.randn(config.vocab_size, config.d_model) / config.d_model**0.5).requires_grad_()
    labels = torch.randint(config.vocab_size, (batch_size * length,))
    yield Case(
        "loss in chunks",
        f"{batch_size * length} x {config.d_model}, {config.vocab_size} words",
        lambda: chunked_cross_entropy(states, weight, labels, label_smoothing=0.1),
        lambda: smoothed_cross_entropy(nn.functional.linear(states, weight), labels, 0.1),
        True,
        True,
    )


def biarn_cases(size: str, batch_size: int, length: int) -> Iterator[Case]:
    from recnmt_hf import BiARNTransformerConfig
    from recnmt_hf.models import kernels_biarn_transformer
    from recnmt_hf.models import modeling_biarn_transformer as biarn
    from recnmt_hf.models.attention import MultiHeadAttention
    from recnmt_hf.models.kernels_biarn_transformer import AbsorbingAttention

    config: Any = BiARNTransformerConfig.from_preset(size)
    config._attn_implementation = "sdpa"
    recurrence = biarn.AttentiveRecurrence(config)
    inputs = torch.randn(batch_size, length, config.d_model, requires_grad=True)
    mask = sentences(batch_size, length)
    initial = [torch.zeros(batch_size, config.recurrence_hidden_size) for _ in recurrence.directions]
    steps, heads = config.recurrence_steps, config.encoder_attention_heads
    shape = f"{batch_size} x {length}, {steps} steps"

    def run(steps_of: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        return lambda: steps_of(recurrence.directions, inputs, mask, initial, steps)[0]

    def read(reading: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        directions = [kernels_biarn_transformer.DirectionWeights.of(direction) for direction in recurrence.directions]
        query = torch.randn(len(directions), batch_size, heads, config.d_model // heads)
        drop = partial(kernels_shared.dropout, p=config.attention_dropout, training=recurrence.training)

        def all_steps() -> torch.Tensor:
            one = reading(directions, inputs, mask, heads, drop, steps)
            return torch.stack([one(query)[1] for _ in range(steps)])

        return all_steps

    few = kernels_biarn_transformer.few_steps(steps, heads, inputs)
    for trains in (True, False):
        yield Case(
            "steps of a BiARN",
            shape,
            run(kernels_biarn_transformer.attentive_steps),
            run(biarn.attentive_steps_reference),
            kernels_shared.allowed(),
            trains,
        )
        yield Case(
            "BiARN reads words",
            shape,
            read(kernels_biarn_transformer.reads_words),
            read(kernels_biarn_transformer.reads_projected_words),
            few and kernels_shared.allowed(),
            trains,
        )
    attention = AbsorbingAttention(config, config.d_model, heads, config.attention_dropout, layer_idx=0, memory="r")
    attention.train()
    memory = torch.randn(batch_size, steps, config.d_model, requires_grad=True)
    states = torch.randn(batch_size, length, config.d_model, requires_grad=True)
    taken = attention.absorbs(states, memory, None)
    yield Case(
        "attention absorbed by its memory",
        shape,
        lambda: attention(states, memory)[0],
        lambda: MultiHeadAttention.forward(attention, states, memory)[0],
        taken,
        True,
    )


def absorbed_step_cases(size: str, batch_size: int, beams: int) -> Iterator[Case]:
    """Attention of a decoding step to recurrence states that are already projected."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    from recnmt_hf import BiARNTransformerConfig
    from recnmt_hf.models.attention import MultiHeadAttention
    from recnmt_hf.models.decoder_cache import SourceMemoryCache
    from recnmt_hf.models.kernels_biarn_transformer import AbsorbingAttention

    config: Any = BiARNTransformerConfig.from_preset(size)
    config._attn_implementation = "sdpa"
    heads = config.decoder_attention_heads
    attention = AbsorbingAttention(config, config.d_model, heads, 0.0, layer_idx=0, memory="recurrence").eval()
    memory = torch.randn(batch_size, config.recurrence_steps, config.d_model)
    state = torch.randn(batch_size * beams, 1, config.d_model)
    caches = [EncoderDecoderCache(DynamicCache(), SourceMemoryCache(1)) for _ in range(2)]
    yield Case(
        "attention absorbed by its memory",
        f"step of {batch_size} x {beams} beams",
        lambda: attention(state, memory, cache=caches[0])[0],
        lambda: MultiHeadAttention.forward(attention, state, memory, cache=caches[1])[0],
        attention.absorbs(state, memory, caches[0]),
        False,
    )


def rnmt_cases(size: str, batch_size: int, length: int) -> Iterator[Case]:
    from recnmt_hf import RNMTConfig
    from recnmt_hf.models import kernels_rnmt
    from recnmt_hf.models import modeling_rnmt as rnmt

    config: Any = RNMTConfig.from_preset(size)
    width = rnmt.RelationConvolutions.width(config)
    propagation = rnmt.RelationPropagation(config)
    features = torch.randn(batch_size, length, width, requires_grad=True)
    mask = sentences(batch_size, length)
    decoder = rnmt.DecoderRecurrence(config)
    words = torch.randn(batch_size, length, config.d_model, requires_grad=True)
    annotations = torch.randn(batch_size, length, config.annotation_size, requires_grad=True)
    visible = mask.bool()[:, None]
    state = torch.zeros(batch_size, config.d_model)

    def fast_steps() -> torch.Tensor:
        keys, values = decoder.project_memory(annotations)
        return decoder(words, keys, values, visible, state, None)[2]

    for trains in (True, False):
        yield Case(
            "pairs in tiles (RNMT)",
            f"{batch_size} x {length}, width {config.relation_hidden_size}",
            lambda: kernels_rnmt.all_pairs(propagation.pair_layers, features, mask),
            lambda: rnmt.all_pairs_reference(propagation.pair_layers, features, mask)[0],
            kernels_shared.allowed(),
            trains,
        )
        yield Case(
            "steps of the RNMT decoder",
            f"{batch_size} x {length} steps",
            fast_steps,
            lambda: decoder(words, annotations, None, visible, state, None)[2],
            kernels_shared.allowed(),
            trains,
        )


def vrnmt_cases(size: str, batch_size: int, length: int) -> Iterator[Case]:
    from recnmt_hf import VRNMTConfig
    from recnmt_hf.models.modeling_vrnmt import VRNMTRecurrence

    config: Any = VRNMTConfig.from_preset(size)
    decoder = VRNMTRecurrence(config)
    words = torch.randn(batch_size, length, config.d_model, requires_grad=True)
    annotations = torch.randn(batch_size, length, config.annotation_size, requires_grad=True)
    visible = sentences(batch_size, length).bool()[:, None]
    state = torch.zeros(batch_size, config.d_model)
    noise = torch.randn(batch_size, length, config.latent_size)

    def steps(is_fast: bool, trains: bool) -> torch.Tensor:
        keys, values = decoder.project_latent_memory(trains, annotations) if is_fast else (annotations, None)
        latents = (words.detach(), noise) if trains else (None, None)
        return decoder(words, keys, values, visible, state, None, *latents, None)[2]

    for trains in (True, False):
        name, shape = "steps of the VRNMT decoder", f"{batch_size} x {length} steps"
        fast, reference = partial(steps, True, trains), partial(steps, False, trains)
        yield Case(name, shape, fast, reference, kernels_shared.allowed(), trains)


def onlstm_cases(size: str, batch_size: int, length: int) -> Iterator[Case]:
    from recnmt_hf import ONLSTMTransformerConfig
    from recnmt_hf.models.modeling_onlstm_transformer import ONLSTM
    from recnmt_hf.models.recurrent_layers import MaskedRNN

    config: Any = ONLSTMTransformerConfig.from_preset(size)
    rnn: Any = ONLSTM(config.onlstm_chunk_size, config.d_model, config.rnn_hidden_size, bidirectional=True)
    inputs = torch.randn(batch_size, length, config.d_model, requires_grad=True)
    mask = sentences(batch_size, length)
    fast = partial(rnn, inputs, mask)
    reference = partial(MaskedRNN.forward, rnn, inputs, mask)
    for trains in (True, False):
        yield Case("steps of an ON-LSTM", f"{batch_size} x {length}", fast, reference, kernels_shared.allowed(), trains)


def scan_cases(config: Any, batch_size: int, length: int) -> Iterator[Case]:
    """The recurrence of an SSRU decoder."""
    from recnmt_hf.models import light_decoders

    shape = (batch_size, length, config.d_model)
    decay, values = torch.rand(shape).requires_grad_(), torch.randn(shape, requires_grad=True)
    inputs = decay, values, torch.zeros(batch_size, config.d_model)
    fast, slow = (
        partial(run, *inputs) for run in (light_decoders.LinearScan.apply, light_decoders.linear_scan_reference)
    )
    text = f"{batch_size} x {length} x {config.d_model}"
    for trains in (True, False):
        yield Case("scan of an SSRU", text, fast, slow, kernels_shared.allowed(), trains)


def time_case(case: Case, rounds: int) -> PathTiming:
    """Time both ways in turns, each repeated until a round takes some milliseconds."""

    def timed(run: Callable[[], Any]) -> Callable[[], Any]:
        def once() -> None:
            if case.trains:
                backwards(run())
            else:
                with torch.no_grad():
                    run()

        return once

    pair = {"reference": timed(case.reference), "fast": timed(case.fast)}
    first = time_in_turns(pair, 1)
    repeats = max(1, int(0.005 / max(min(*first["reference"], *first["fast"]), 1e-6)))

    def repeated(run: Callable[[], None]) -> Callable[[], None]:
        def many() -> None:
            for _ in range(repeats):
                run()

        return many

    seconds = time_in_turns({name: repeated(run) for name, run in pair.items()}, rounds)
    return PathTiming(
        case.path,
        f"{case.shape}, {'training' if case.trains else 'inference'}",
        statistics.median(seconds["fast"]) / repeats,
        statistics.median(seconds["reference"]) / repeats,
        statistics.median(a / b for a, b in zip(seconds["reference"], seconds["fast"], strict=True)),
        "yes" if case.taken else "no",
    )


def time_paths(
    size: str, vocab_size: int, batch_size: int, sources: int, length: int, beams: int, rounds: int
) -> Iterator[PathTiming]:
    """
    Time all fast paths on the CPU.

    Args:
        size: Preset of all models.
        vocab_size: Size of the output layer.
        batch_size, length: Sentences per batch in training and encoding, and tokens per sentence.
        sources, beams: Sentences of a decoding step, and beams per sentence.
        rounds: Turns per candidate.
    """
    from recnmt_hf import NMTTransformerConfig

    torch.manual_seed(1)
    config = NMTTransformerConfig.from_preset(size, vocab_size=vocab_size)
    for cases in (
        matmul_cases(config, batch_size, length),
        packed_matmul_cases(config, sources * beams),
        dropout_cases(config, batch_size, length),
        attention_cases(config, batch_size, length, beams),
        loss_cases(config, batch_size, length),
        biarn_cases(size, batch_size, length),
        absorbed_step_cases(size, sources, beams),
        rnmt_cases(size, batch_size, length),
        vrnmt_cases(size, batch_size, length),
        onlstm_cases(size, batch_size, length),
        scan_cases(config, batch_size, length),
    ):
        for case in cases:
            yield time_case(case, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser(__doc__, {"default": 16}).parse_args(argv)
    torch.set_num_threads(args.threads)
    print_setup(args, torch.device("cpu"), "float32")
    sizes = (args.size, args.vocab_size, args.train_batch_size, args.generate_batch_size, args.mean_length)
    for timing in time_paths(*sizes, args.beams, args.rounds):
        print(timing, flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
