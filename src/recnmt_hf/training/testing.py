"""Evaluations during training, and test sets: scores and translations of a finished model, saved in its folder."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from .._plain_text import on_one_line
from ..data.text import read_lines, write_lines
from ..data.tokenization import split_tags
from ..data.tree_inputs import sentences_of_columns
from ..errors import UserError
from ..inference.backends.torch_model import TorchBackend
from ..inference.options import DecodingOptions
from ..inference.translator import Translator
from ..metrics.bleu import MetricScore, References
from ..metrics.suspicion import suspicions
from .evidence import TRANSLATIONS, Evidence, TestScore, refuse_links, sum_of_lines
from .metrics import TextScorer
from .processes import logger


SAMPLES = 1000
GRID = tuple(round(0.1 * step, 1) for step in range(21))  # exponents of the length penalty that are compared
N_BEST = 16  # hypotheses of each sentence that are rescored


def validation_options(decoding: Mapping[str, Any], beams: int) -> DecodingOptions:
    """Return the options of test sets with other `beams`; long sources must not end the training."""
    replaced = ("beams", "num_hypotheses", "alignments", "on_long", "generate")
    options = {name: value for name, value in decoding.items() if name not in replaced}
    generate = dict(decoding.get("generate", {}))
    if beams == 1:
        generate.pop("early_stopping", None)  # transformers rejects it
    on_long: Any = "truncate" if decoding.get("on_long") == "truncate" else "split"
    return DecodingOptions(**options, beams=beams, on_long=on_long, generate=generate)


def translate_segments(
    translator: Translator,
    sources: Sequence[Any],
    starts: Sequence[tuple[str, tuple[str | None, ...]]],
    options: DecodingOptions,
    warn_short: bool = False,
) -> list[str]:
    """Return translations, one line each; `starts` has for each its prefix and the codes of its languages, if any."""
    texts = [""] * len(sources)
    for codes in dict.fromkeys(codes for _, codes in starts):
        rows = [row for row, (_, own) in enumerate(starts) if own == codes]
        names: dict[str, Any] = dict(zip(("source_lang", "target_lang"), codes, strict=False))
        own = replace(options, split_sentences="never", **names)  # splitting would make scores incomparable
        segments = [sources[row] for row in rows], own, [starts[row][0] for row in rows]
        results = translator.translate(*segments, scores=False, warn_short=warn_short)
        for row, result in zip(rows, results, strict=True):
            texts[row] = on_one_line(result.text)
    return texts


def test_model(
    translator: Translator,
    name: str,
    sources: Sequence[Any],
    references: Sequence[Sequence[str]],
    language: str,
    options: DecodingOptions,
    scorer: TextScorer,
    dataset: Iterable[Mapping[str, Any]] = (),
    starts: Sequence[tuple[str, tuple[str | None, ...]]] = (),
) -> tuple[TestScore, list[str], str]:
    """Translate and score a test set of `dataset`, its corpora; return score, translations and a line to print."""
    starts = starts or [("", ())] * len(sources)
    texts = translate_segments(translator, sources, starts, options, scorer.metric != "rouge")
    scores = scorer.scores(texts, references)
    faults = [*suspicions(texts, references, list(map(str, sources)))]
    if not any(codes for _, codes in starts):
        codec, extra = translator.codec, options.max_length_extra
        limits = [options.max_length_factor * len(codec.encode_source(source)) + extra for source in sources]
        pairs = zip(references[0], limits, strict=True)
        cut = sum(bool(text.strip()) and len(codec.encode_target(text).ids) > limit for text, limit in pairs)
        longer = "references are longer than max_length_factor and max_length_extra allow"
        faults += [f"{cut} of {len(sources)} {longer}."] if cut else []
    for fault in faults:
        logger.warning(f"Warning: {name}: {fault}")
    default, first = asdict(DecodingOptions()), next(iter(scores.values()))
    always = ("beams", "length_penalty_type", "length_penalty")
    score = TestScore(
        name=name,
        scores={kind: score.score for kind, score in scores.items()},
        signature=first.signature,
        sentences=len(sources),
        source_sha256=sum_of_lines(sources),
        reference_sha256=sum_of_lines(chain(*references)),
        decoding={key: value for key, value in asdict(options).items() if value != default[key] or key in always},
        translations=f"{TRANSLATIONS}/{name}.{language}",
        dataset=[dict(corpus) for corpus in dataset],
        references=len(references),
        length_ratio=first.length_ratio,
    )
    return score, texts, f"{name}: {', '.join(map(str, scores.values()))}"


test_model.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's


def add_score(evidence: Evidence, folder: Path, score: TestScore, texts: Sequence[str]) -> None:
    """Write translations into a model's folder (`UserError` for a link); their score replaces one in its evidence."""
    refuse_links(folder / score.translations)
    write_lines(folder / score.translations, texts)
    evidence.tests = [test for test in evidence.tests if test.name != score.name] + [score]


def compare_with_baseline(
    score: TestScore, texts: Sequence[str], references: References, baseline: Path, name: str, scorer: TextScorer
) -> None:
    """Add to a score that of another model, in the folder `baseline` and called `name`, on the same test set."""
    other = next((test for test in Evidence.load(baseline).tests if test.name == score.name), None)
    sums = score.source_sha256, score.reference_sha256
    if other is None or (other.source_sha256, other.reference_sha256) != sums:
        raise UserError(f"{baseline} has no translations of {score.name} with the same sentences.", field=baseline)
    baseline_texts = list(read_lines(baseline / other.translations))
    scores = scorer.scores(baseline_texts, references)  # the stored ones may be of another tokenizer
    score.baseline, score.baseline_scores = name, {kind: own.score for kind, own in scores.items()}
    score.p_value = scorer.compare(baseline_texts, texts, references, SAMPLES).p_value
    score.test = f"approximate randomization, {SAMPLES} samples"


def evaluate(trainer: Any, dataset: Dataset) -> dict[str, float]:
    """Return loss, perplexity and, if the dataset has its text, the scores of generated text."""
    model = trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model
    model.eval()
    loss = token_loss(trainer, model, dataset)
    metrics = {"loss": loss, "perplexity": math.exp(min(loss, 50.0))}
    if trainer.args.bleu_samples > 0 and "target" in dataset.column_names:
        scores = sample_scores(trainer, dataset)
        metrics |= {name: score.score for name, score in scores.items()}
        if (ratio := next(iter(scores.values())).length_ratio) is not None:
            metrics["length_ratio"] = ratio
    return metrics


@torch.no_grad()
def token_loss(trainer: Any, model: torch.nn.Module, dataset: Dataset) -> float:
    """Return the mean negative log-likelihood of a target token, unsmoothed."""
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    # The sum needs float64, which not every device has.
    device = torch.device("cpu") if trainer.args.device.type == "mps" else trainer.args.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    # Every process takes every world-th batch, and for sharding as many as the others.
    batches = list(trainer.get_eval_dataloader(dataset))
    for index in range(rank, math.ceil(len(batches) / world) * world, world):
        inputs = trainer._prepare_inputs(batches[min(index, len(batches) - 1)])
        tokens = (inputs["labels"] != -100).sum()
        settings = {"return_logits": False} if trainer.smooths_itself else {}
        with trainer.compute_loss_context_manager():
            loss = model(**inputs, **settings).loss  # a mean over the batch's tokens
        if index < len(batches):
            total += torch.stack([loss * tokens, tokens.to(loss.dtype)]).to(device).double()
    total = trainer.accelerator.reduce(total, reduction="sum")
    return (total[0] / total[1]).item()


def sample_scores(trainer: Any, dataset: Dataset) -> dict[str, MetricScore]:
    """Return BLEU or ROUGE of the first `bleu_samples` sentences, distributed over the processes."""
    sample = dataset.select(range(min(trainer.args.bleu_samples, len(dataset))))
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    own = list(range(rank, len(sample), world))
    model = trainer.accelerator.unwrap_model(trainer.model)
    translator = Translator.from_backend(TorchBackend(model, trainer.tokenizers, check=False))
    sources = sentences_of_columns(sample["source"][:], sample[:])
    tags, references = zip(*(split_tags(text, trainer.tokenizers.target) for text in sample["target"][:]), strict=True)
    codes = [sample[name][:] for name in ("source_lang", "target_lang") if name in sample.column_names]
    languages: Any = list(zip(*codes, strict=True)) or [()] * len(sample)
    texts, starts = [sources[i] for i in own], [(tags[i], languages[i]) for i in own]
    translations = translate_segments(translator, texts, starts, trainer.validation_options)
    pairs = list(zip(own, translations, strict=True))
    pairs = sorted(gather_object(pairs)) if world > 1 else pairs
    return trainer.args.scorer.scores([text for _, text in pairs], references)


def tune_length_penalty(
    translator: Translator, sources: Sequence[Any], references: References, options: DecodingOptions, scorer: TextScorer
) -> dict[float, float]:
    """
    Return the score on a validation set by exponent of [`GRID`], the best one first. Each sentence is translated once,
    and its [`N_BEST`] hypotheses are rescored; a search with the chosen exponent may find others.
    """
    wide = max(N_BEST, options.beams)
    options = replace(options, beams=wide, num_hypotheses=wide, split_sentences="never")
    lists = [translation.hypotheses for translation in translator.translate(sources, options)]
    scores = {}
    for alpha in GRID:
        penalty = replace(options, length_penalty=alpha).penalty()
        best = [max(rows, key=lambda row: row.log_prob / max(len(row.tokens), 1) ** penalty) for rows in lists]
        *_, score = scorer.scores([on_one_line(row.text) for row in best], references).values()
        scores[alpha] = score.score
    return dict(sorted(scores.items(), key=lambda entry: -entry[1]))
