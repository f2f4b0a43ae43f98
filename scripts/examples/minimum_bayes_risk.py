#!/usr/bin/env python
"""
Minimum Bayes risk decoding (Kumar and Byrne, 2004; Eikema and Aziz, 2020): of the hypotheses of each sentence, print
the one that agrees most with the others, by a metric of the package mbrs.

    recnmt translate MODEL --input test.en --output samples.jsonl --format jsonl --n-best 32 --beams 1 \\
        --generate do_sample=true
    pip install mbrs "setuptools<81"     # in an environment of its own: one of its packages needs transformers 4
    python scripts/examples/minimum_bayes_risk.py samples.jsonl > test.de

Neural metrics (`--metric comet`) choose better than chrF and BLEU, and download a model.
"""

import argparse
import json
from itertools import groupby

from mbrs.decoders import DecoderMBR
from mbrs.metrics import get_metric


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hypotheses", help="output of `recnmt translate --n-best N --format jsonl`")
    parser.add_argument("--metric", default="chrf", help="name of a metric of mbrs (default: chrf)")
    args = parser.parse_args()
    metric = get_metric(args.metric)
    decoder = DecoderMBR(DecoderMBR.Config(), metric(metric.Config()))
    with open(args.hypotheses, encoding="utf-8") as lines:
        records = map(json.loads, lines)
        for _, group in groupby(records, key=lambda record: record["line"]):
            own = list(group)
            texts = [record["text"] for record in own]
            print(decoder.decode(texts, texts, source=own[0]["source"], nbest=1).sentence[0])


if __name__ == "__main__":
    main()
