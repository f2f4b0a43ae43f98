#!/usr/bin/env python
"""
Decode the validation and test sets of finished runs for all length penalties, before their models are deleted.

    python scripts/experiments/length_penalties.py outputs/table/* --store model_cards/evidence/multi30k_table

Each set is translated twice: with the recipe's beam and length penalty, and with a beam of 16, whose 16 hypotheses are
rescored with each exponent alpha of the grid (log-probability / ((5 + length) / 6)^alpha). The alpha with the best
validation BLEU is used in a real search of all sets. The folder of a run, or with `--store` its folder of evidence
(`ROW-SEED`, with `evidence.json` and the translations of the test sets), then has:

- `length_penalties.json`: the settings, the tuned alpha, and for each set BLEU, brevity penalty and length ratio of
  each decoding, with chrF and TER of both searches;
- `translations/SET.LANG` and `translations/SET.tuned.LANG`: translations with the recipe's and the tuned alpha;
- `nbest/SET.jsonl.gz`: for each sentence the hypotheses that are best for some alpha from 0 to 3, each as its number of
  tokens, log-probability and text, so that scores for other grids need no model.
"""

import argparse
import gzip
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sacrebleu

from recnmt_hf import Recipe, Translator
from recnmt_hf.data.corpora import load_test_set
from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.metrics.bleu import bleu_metric, bleu_tokenizer, ter_score
from recnmt_hf.training.evidence import EVIDENCE, TRANSLATIONS, hardware, sum_of_lines, versions


BEAM = 16
GRID = [round(0.1 * step, 1) for step in range(21)]
# The n-best lists keep what any of these exponents prefers.
FINE = [0.02 * step for step in range(151)]
RESULT = "length_penalties.json"

# A hypothesis: number of tokens with the end token, log-probability, text.
Scored = tuple[int, float, str]


def choose(hypotheses: Sequence[Scored], alpha: float) -> Scored:
    """Return the hypothesis with the highest log-probability / ((5 + length) / 6)^alpha (Wu et al., 2016, eq. 14)."""
    return max(hypotheses, key=lambda one: one[1] / ((5 + one[0]) / 6) ** alpha)


def bleu_and_length(texts: Sequence[str], references: Sequence[Sequence[str]], language: str) -> dict[str, Any]:
    """Return BLEU and what it says of the length of translations."""
    bleu = bleu_metric(tokenize=bleu_tokenizer(language))
    result = bleu.corpus_score(list(texts), [list(one) for one in references])
    return {
        "bleu": round(result.score, 3),
        "brevity_penalty": round(result.bp, 4),
        "length_ratio": round(result.sys_len / result.ref_len, 4),
        "signature": str(bleu.get_signature()),
    }


def all_scores(texts: Sequence[str], references: Sequence[Sequence[str]], language: str) -> dict[str, Any]:
    """Return BLEU, length, chrF and TER of translations."""
    streams = [list(one) for one in references]
    return {
        **bleu_and_length(texts, references, language),
        "chrf": round(sacrebleu.CHRF().corpus_score(list(texts), streams).score, 3),
        "ter": round(ter_score(texts, streams, bleu_tokenizer(language)).score, 3),
    }


def translate(
    translator: Translator, sources: Sequence[str], options: DecodingOptions, tag: str | None
) -> list[list[Scored]]:
    """Return the hypotheses of each sentence."""
    prefixes = None if tag is None else [tag] * len(sources)
    results = translator.translate(sources, options, prefixes)
    return [
        [(len(one.tokens), round(one.log_prob, 4), " ".join(one.text.split())) for one in result.hypotheses]
        for result in results
    ]


def write_text(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def decode_run(run: Path, target: Path) -> None:
    """Decode the sets of a finished run, and write the results into `target`."""
    recipe = Recipe.from_file(run / "recipe.yaml")
    data, language = recipe.data, recipe.data.target_lang
    translator = Translator.from_pretrained(run / "model")
    options = replace(recipe.decoding, split_sentences="never")
    wide = replace(options, beams=BEAM, num_hypotheses=BEAM)
    corpora = {"validation": data.validation, **recipe.test}
    sets = {name: load_test_set(of_set, data.source_lang, language, data.on_empty) for name, of_set in corpora.items()}
    tags = {name: of_set[0].target_tag for name, of_set in corpora.items()}
    lists: dict[str, list[list[Scored]]] = {}
    scores: dict[str, dict[str, Any]] = {}
    for name, (sources, references) in sets.items():
        texts = [one[0][2] for one in translate(translator, sources, options, tags[name])]
        write_text(target / TRANSLATIONS / f"{name}.{language}", texts)
        scores[name] = {
            "sentences": len(sources),
            "source_sha256": sum_of_lines(sources),
            "recipe": all_scores(texts, references, language),
        }
        lists[name] = translate(translator, sources, wide, tags[name])
        grid = {alpha: [choose(one, alpha)[2] for one in lists[name]] for alpha in GRID}
        scores[name]["rescored"] = {
            str(alpha): bleu_and_length(lines, references, language) for alpha, lines in grid.items()
        }
        kept = [
            sorted({choose(one, alpha) for alpha in FINE}, key=lambda hypothesis: hypothesis[0]) for one in lists[name]
        ]
        path = target / "nbest" / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in kept)
        path.write_bytes(gzip.compress(content.encode(), mtime=0))
    rescored = scores["validation"]["rescored"]
    tuned = max(GRID, key=lambda alpha: rescored[str(alpha)]["bleu"])
    for name, (sources, references) in sets.items():
        with_tuned = replace(options, length_penalty_type="vaswani", length_penalty=tuned)
        texts = [one[0][2] for one in translate(translator, sources, with_tuned, tags[name])]
        write_text(target / TRANSLATIONS / f"{name}.tuned.{language}", texts)
        scores[name]["tuned"] = all_scores(texts, references, language)
    result = {
        "beams": options.beams,
        "length_penalty_type": options.length_penalty_type,
        "length_penalty": options.length_penalty,
        "n_best": BEAM,
        "tuned_length_penalty": tuned,
        "hardware": hardware(translator.model.device),
        "versions": versions(),
        "sets": scores,
    }
    with (target / RESULT).open("w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    for name, values in scores.items():
        own, best = values["recipe"], values["tuned"]
        print(
            f"{target.name}, {name}: BLEU {own['bleu']:.2f} (length ratio {own['length_ratio']:.3f}) with alpha "
            f"{options.length_penalty}, {best['bleu']:.2f} ({best['length_ratio']:.3f}) with {tuned}"
        )


def folder_of_evidence(run: Path, store: Path) -> Path:
    """Return the folder `ROW-SEED` for a run that `sweep.py` called `ROW,seed=SEED`."""
    row, _, seed = run.name.partition(",seed=")
    return store / f"{re.sub('[^A-Za-z0-9-]+', '_', row).strip('_')}-{seed or 1}"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--store", type=Path, help="folder of a comparison; defaults to each run's own folder")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    for run in args.runs:
        target = folder_of_evidence(run, args.store) if args.store else run
        if (target / RESULT).is_file() or not (run / "model" / EVIDENCE).is_file():
            continue  # done, or the run has not finished
        target.mkdir(parents=True, exist_ok=True)
        if args.store:
            shutil.copy(run / "model" / EVIDENCE, target)
        decode_run(run, target)


if __name__ == "__main__":
    main()
