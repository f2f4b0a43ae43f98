#!/usr/bin/env python3
"""
Time of recurrent layers relative to `torch.nn.LSTM` of the same width, one direction, measured in turns within one run.

    python scripts/benchmarks/recurrent_layers.py --shapes 64x27 16x128 --width 512 --rounds 9
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measuring import time_in_turns

from recnmt_hf.models.kernels_cpu_matmuls import StepMatmuls
from recnmt_hf.models.modeling_onlstm_transformer import ONLSTM
from recnmt_hf.models.modeling_rpe_transformer import SimpleRecurrentUnit
from recnmt_hf.models.recurrent_layers import RecurrentLayer


def layers(width: int) -> dict[str, torch.nn.Module]:
    """Return the layers to measure; the times of the others are divided by that of the first one."""
    return {
        "nn.LSTM": torch.nn.LSTM(width, width, batch_first=True),
        "nn.GRU": torch.nn.GRU(width, width, batch_first=True),
        "lstm": RecurrentLayer("lstm", width, width),
        "gru": RecurrentLayer("gru", width, width),
        "rnn": RecurrentLayer("rnn", width, width),
        "sru": SimpleRecurrentUnit(width, width),
        "onlstm, chunks of 1": ONLSTM(1, width, width),
        "onlstm, chunks of 8": ONLSTM(8, width, width),
    }


def matmuls(layer: ONLSTM, batch_size: int, length: int, trains: bool) -> Callable[[], Any]:
    """Return a run of only the matmuls of an ON-LSTM, as [`ONLSTMSteps`] computes them: a lower bound of its time."""
    weight_ih, weight_hh = (weight.detach() for weight in (layer.forward_rnn.weight_ih, layer.forward_rnn.weight_hh))
    words = torch.randn(length * batch_size, weight_ih.shape[1])
    states, gradients = torch.randn_like(words), torch.randn(len(words), len(weight_ih))

    @torch.no_grad()
    def once() -> None:
        of_inputs, of_states = StepMatmuls(weight_ih), StepMatmuls(weight_hh)
        of_inputs(words)
        for state in states.split(batch_size)[1:]:
            of_states(state)
        if trains:
            for gradient in gradients.split(batch_size)[1:]:
                of_states.backward(gradient)
            of_inputs.backward(gradients)
            of_inputs.weight_gradient(gradients, words)
            of_states.weight_gradient(gradients[batch_size:], states[batch_size:])

    return once


def run(layer: torch.nn.Module, inputs: torch.Tensor, trains: bool) -> Callable[[], Any]:
    def once() -> None:
        with torch.set_grad_enabled(trains):
            outputs = layer(inputs)
            states = outputs[0] if isinstance(outputs, tuple) else outputs
            if trains:
                states.sum().backward()

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["64x27", "16x128", "1x27"], help="batch size x length")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("shape\tlayer\tinference\ttraining")
    for shape in args.shapes:
        batch_size, length = map(int, shape.split("x"))
        columns = []
        for trains in (False, True):
            inputs = torch.randn(batch_size, length, args.width, requires_grad=trains)
            measured = layers(args.width)
            candidates = {name: run(layer, inputs, trains) for name, layer in measured.items()}
            for name, layer in measured.items():
                if isinstance(layer, ONLSTM):
                    candidates[f"{name}: matmuls alone"] = matmuls(layer, batch_size, length, trains)
            seconds = time_in_turns(candidates, args.rounds)
            base = seconds["nn.LSTM"]
            columns.append(
                {name: [one / other for one, other in zip(own, base, strict=True)] for name, own in seconds.items()}
            )
        for name in columns[0]:
            cells = []
            for column in columns:
                low, middle, high = statistics.quantiles(column[name], n=4)
                cells.append(f"{middle:.2f}x ({low:.2f} to {high:.2f})")
            print("\t".join([shape, name, *cells]), flush=True)


if __name__ == "__main__":
    main()
