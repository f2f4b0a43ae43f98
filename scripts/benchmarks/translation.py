#!/usr/bin/env python
"""
Speed ratios of translating a file, alternating within one run: transformers' search with a scoring pass, this
package's search, int8 weights, and exported models. Processor time of one thread.

    python scripts/benchmarks/translation.py outputs/multi30k/model --source test.en --engine outputs/ct2 --beams 4
"""

import argparse
import statistics
import time

import torch

from recnmt_hf.data.text import read_lines
from recnmt_hf.inference.backends import torch_model
from recnmt_hf.inference.translator import DecodingOptions, Translator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--source", required=True, help="file with one sentence per line")
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--engine", nargs="*", default=[], help="exported folders of the model (see `recnmt export`)")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--max-length-extra", type=int, default=50)
    parser.add_argument("--no-int8", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sentences = [line for line, _ in zip(read_lines(args.source), range(args.sentences), strict=False)]
    options = DecodingOptions(beams=args.beams, max_length_extra=args.max_length_extra)
    model = Translator.from_pretrained(args.model, device="cpu")
    systems = {
        "transformers' search, scores": (model, False, True),
        "search, scores": (model, True, True),
        "search": (model, True, False),
    }
    if not args.no_int8:
        systems["search, int8"] = (Translator.from_pretrained(args.model, quantization="int8"), True, False)
    systems.update({folder: (Translator.from_pretrained(folder, device="cpu"), True, False) for folder in args.engine})
    own = torch_model.can_drop_finished
    times: dict[str, list[float]] = {name: [] for name in systems}
    texts: dict[str, list[str]] = {}
    for turn in range(args.rounds + 1):  # the first one warms up
        for name, (translator, leaves, scores) in systems.items():
            torch_model.can_drop_finished = own if leaves else lambda *_: False
            begin = time.process_time()
            texts[name] = [translation.text for translation in translator.translate(sentences, options, scores=scores)]
            if turn:
                times[name].append(time.process_time() - begin)
    first = next(iter(systems))
    for name, measured in times.items():
        ratios = [one / other for one, other in zip(times[first], measured, strict=True)]
        same = sum(one == other for one, other in zip(texts[name], texts[first], strict=True))
        print(
            f"{name}: {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{len(sentences) / statistics.median(measured):.1f} sentences a second, {same} of {len(sentences)} equal"
        )


if __name__ == "__main__":
    main()
