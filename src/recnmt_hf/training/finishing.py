"""The end of a run: averaging checkpoints, recomputing batch norms, evidence, testing."""

import json
import os
import re
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._loading_errors import looks_local
from .._plain_text import is_blank
from ..data.corpora import load_pairs, load_test_set
from ..data.files import open_output, remove
from ..data.sharded import ShardedDataset
from ..data.text import write_lines
from ..errors import UserError
from ..inference.loading import load_model
from ..inference.options import TEXT_OPTIONS
from ..inference.translator import Translator
from ..options import stated
from . import checkpoints
from .checkpoints import FINAL, PARTIAL_FINAL, RESULTS, checkpoints_in, state_of, steps_of
from .evidence import Evidence, average_of, curve_of, differences, hardware, versions, without_private
from .plan import Plan
from .processes import logger
from .recipe import AVERAGE
from .testing import add_score, test_model
from .trainer import TranslationTrainer


# Batches over which the averages of batch norm are recomputed for averaged weights.
NORM_BATCHES = 200


def finish(plan: Plan, trainer: TranslationTrainer) -> None:
    """Average checkpoints into the final model, unless an earlier process did, and test it."""
    output_dir, metric = plan.output_dir, plan.arguments.metric_for_best_model or "loss"
    chosen = checkpoints.choose_checkpoints(output_dir, plan.average, "best" if plan.average_best else "last", metric)
    names = [folder.name for folder in chosen]
    logger.info(f"Final model: {'the average of ' * (len(names) > 1)}{', '.join(names)}.")
    if len(chosen) < plan.average:
        logger.info(f"The run has fewer checkpoints than average.count={plan.average}.")
    final, working = output_dir / FINAL, output_dir / PARTIAL_FINAL
    is_resumed = trainer.state.global_step == trainer.steps_before  # without a step
    if is_resumed and is_average(final, names, steps_of(checkpoints_in(output_dir)[-1][1])):
        with Evidence.changing(final) as evidence:  # its speed and other scores stay
            evidence.recipe = without_private(differences(plan.settings))
    else:
        checkpoints.average_checkpoints(chosen, working)
        if len(chosen) > 1:
            refresh_norms(working, trainer)
        evidence_of_run(plan, trainer, names).save(working)
        remove(output_dir / RESULTS)  # of an earlier model
        remove(final)
        os.replace(working, final)
    if plan.tests:
        results = {**test(plan, final), "averaged": names}
        with open_output(output_dir / RESULTS) as file:
            json.dump(results, file, indent=2)


def is_average(folder: Path, names: list[str], steps: int) -> bool:
    """Return whether a folder has the intact average of these checkpoints of a run with so many steps."""
    try:
        training = Evidence.load(folder).training
        load_model(folder, torch.device("cpu"))
    except Exception:  # whatever is damaged, it is made anew
        return False
    return training.get("averaged") == names and training.get("steps") == steps


def evidence_of_run(plan: Plan, trainer: TranslationTrainer, averaged: list[str]) -> Evidence:
    """Return the evidence of a finished run, without scores."""
    newest = checkpoints_in(plan.output_dir)[-1][1]  # a resumed run without steps has no log of its own
    state, model, tokenizers, data = state_of(newest), trainer.model, trainer.tokenizers, trainer.train_dataset
    duration = state.get("stateful_callbacks", {}).get("Stopwatch", {}).get("attributes", {}).get("before")
    texts = sorted((text for text in trainer.eval_dataset["source"][:] if not is_blank(text)), key=len)
    start = plan.data.model.init_from
    # Mean time of a step of this process, evaluation included, and tokens of all processes in it.
    runtimes = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
    steps = trainer.state.global_step - trainer.steps_before
    seconds = round(runtimes[-1] / steps, 4) if runtimes and steps else None
    sampler = trainer.token_sampler(data, shuffle=True)
    tokens = sampler.tokens / len(sampler) * sampler.num_processes * trainer.args.gradient_accumulation_steps
    kind = "given" if start or plan.data.tokenizers else plan.data.vocabularies[0]["kind"]
    symbols = {"source_symbols": len(tokenizers.source), "target_symbols": len(tokenizers.target)}
    sizes: dict[str, Any] = {"training_pairs": len(data), "validation_pairs": len(trainer.eval_dataset)}
    if isinstance(data, ShardedDataset):
        sizes |= {"pairs_of_corpora": counts} if len(counts := sampler.drawn_pairs()) > 1 else {}  # in an epoch
    elif "corpus" in data.column_names:
        sizes["pairs_of_corpora"] = np.bincount(data["corpus"][:]).tolist()
    return Evidence(
        model={"type": model.config.model_type, "parameters": model.num_parameters(), "preset": plan.data.model.preset},
        languages=[plan.data.source_lang, plan.data.target_lang],
        recipe=differences(plan.settings),
        data=sizes,
        tokenizer={"kind": kind, **symbols, "joint": tokenizers.is_joint},
        training={
            "steps": steps_of(newest),
            "seconds_per_step": seconds,
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
            "seconds": None if duration is None else round(duration),
            "processes": trainer.args.world_size,
            "hardware": hardware(trainer.args.device),
            "dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.args.precision, "float32"),
            "averaged": averaged,
            "seed": trainer.args.seed,
        },
        curve=curve_of(state["log_history"]),
        versions=versions(),
        base_model=None if start is None or looks_local(start) else start,
        example=texts[len(texts) // 2] if texts else "",
    )


def refresh_norms(folder: Path, trainer: TranslationTrainer) -> None:
    """Recompute the running averages of batch norms, which are not means of those averaged (Izmailov et al., 2018)."""
    model = load_model(folder, trainer.args.device)
    norms: list[Any] = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    for norm in norms:  # one after the other: each reads what the new averages of those before it produce
        sampler = trainer.token_sampler(trainer.train_dataset, shuffle=True)
        momentum, norm.momentum = norm.momentum, 1.0  # the averages are those of one batch
        means, variances = [], []
        norm.train()
        with torch.no_grad():
            for batch in islice(trainer.loader(trainer.train_dataset, sampler), NORM_BATCHES):
                model.get_encoder()(**{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")})
                means.append(norm.running_mean.clone())
                variances.append(norm.running_var.clone())
            # Mean and variance of all batches together: the sentences of one have similar lengths.
            norm.running_var.copy_(torch.stack(variances).mean(0) + torch.stack(means).var(0, correction=0))
            norm.running_mean.copy_(torch.stack(means).mean(0))
        norm.eval()
        norm.momentum = momentum
    if norms:
        logger.info(f"Recomputed the averages of {len(norms)} batch norms from at most {NORM_BATCHES} batches.")
        model.save_pretrained(folder)


def test(plan: Plan, folder: Path) -> dict[str, Any]:
    """Translate the test sets; write translations beside the model's folder and into it, scores into its evidence."""
    translator = Translator.from_pretrained(folder, device=plan.arguments.device)
    options, data = plan.decoding, plan.data
    languages, on_empty = (data.source_lang, data.target_lang), data.reading["on_empty"]
    decoding = {entry.name: getattr(options, entry.name) for entry in fields(options) if entry.name not in TEXT_OPTIONS}
    results: dict[str, Any] = {"decoding": decoding}
    sets = {name: load_test_set(corpora, *languages, on_empty) for name, corpora in plan.tests.items()}
    seen: set[str] | None = None  # sentences that are also in the training text
    with suppress(OSError, UserError):  # the text of prepared data may be elsewhere
        wanted = {folded(source) for sources, _ in sets.values() for source in sources} - {""}
        seen = wanted.intersection(folded(pair.source) for pair in load_pairs(data.train, *languages, on_empty))
    for name, corpora in plan.tests.items():
        (sources, references), scorer = sets[name], plan.scorer_of(name)
        starts: list[Any] = []  # tag and languages of each segment
        for corpus in corpora:
            codes = tuple(corpus.language_columns(*languages, translator.tokenizers).values())
            starts += [(corpus.target_tag or "", codes) for _ in corpus.rows(*languages, on_empty, references=True)]
        segments = sources, references, languages[1], options, scorer, map(stated, corpora)
        score, texts, line = test_model(translator, name, *segments, starts)
        write_lines(folder.parent / f"{FINAL}-{name}.{languages[1]}", texts)
        logger.info(line)
        if seen is not None:
            clean = [row for row, source in enumerate(sources) if folded(source) not in seen]
            score.seen = len(sources) - len(clean)
            if clean and score.seen:
                streams = [[stream[row] for row in clean] for stream in references]
                own = scorer.scores([texts[row] for row in clean], streams)
                score.clean_scores = {kind: one.score for kind, one in own.items()}
                shown = ", ".join(f"{kind} {value:.2f}" for kind, value in score.clean_scores.items())
                shown = f"{score.seen} sentences are in the training text; without them {shown}"
                logger.warning(f"Warning: {name}: {shown}.")
        results[name] = {**score.scores, "signature": score.signature, "sentences": len(sources)}
        with Evidence.changing(folder) as evidence:
            add_score(evidence, folder, score, texts)
    if average := average_of(Evidence.load(folder).tests):
        results[AVERAGE] = average
        logger.info(f"average of the test sets: {', '.join(f'{kind} {value:.2f}' for kind, value in average.items())}")
    return results


def folded(text: Any) -> str:
    """Return a text without case, punctuation and spacing."""
    return re.sub(r"[\W_]+", " ", str(text).casefold()).strip()
