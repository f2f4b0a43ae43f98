#!/usr/bin/env python
"""
Compare what two versions of this package compute, bit by bit, on one machine.

    python scripts/compare_outputs.py save before.pt      # in the first version
    python scripts/compare_outputs.py compare before.pt   # in the second one

Small models of all families, with the combinations that their manifests allow, compute losses, gradients, generated
tokens (greedy, sampling, beams, a static cache, a prompt) and translations with n-best lists, scores and alignments,
with fast paths and without.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

import recnmt_hf
from recnmt_hf.data.generated import generate_corpus
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.families import FAMILIES
from recnmt_hf.families.family import COMBINATIONS


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_beams": 1},
    "beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6},
    "static cache": {"num_beams": 2, "cache_implementation": "static"},
}


def variants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, class prefix and configuration fields of each variant."""
    for family in FAMILIES.values():
        yield family.prefix, family.prefix, {}
        yield f"{family.prefix}, small", family.prefix, dict(family.small)
        for name, fields in COMBINATIONS.items():
            yield f"{family.prefix}, {name}", family.prefix, dict(fields)


def build(prefix: str, fields: dict[str, Any], tokenizer: Any) -> Any:
    """Return a model with enlarged random weights, or `None` for fields that the family does not have."""
    torch.manual_seed(1)
    try:
        config = getattr(recnmt_hf, f"{prefix}Config").from_preset(
            "tiny", vocab_size=len(tokenizer), d_model=32, max_position_embeddings=128, **fields
        )
    except (ValueError, TypeError):
        return None
    if any(getattr(config, name, None) != value for name, value in fields.items()):
        return None
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 2.5  # some translations end early
    return model


def outputs_of(model: Any, tokenizer: Any, sentences: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the results of a model by name."""
    sources, targets = ([pair[side] for pair in sentences] for side in (0, 1))
    batch = dict(tokenizer(sources, return_tensors="pt", padding=True))
    batch.pop("token_type_ids", None)
    labels = tokenizer(text_target=targets, return_tensors="pt", padding=True).input_ids
    labels[labels == tokenizer.pad_token_id] = -100
    heads = {
        name: torch.arange(-1, batch["input_ids"].shape[1] - 1).expand_as(batch["input_ids"])
        for name in getattr(model.get_encoder(), "source_inputs", ())
    }
    heads = {
        name: one.clamp(min=0) % model.config.num_relations if "relations" in name else one
        for name, one in heads.items()
    }
    batch |= heads
    for mode in ("train", "eval"):
        for smoothing, return_logits in ((0.0, True), (0.1, False)):
            torch.manual_seed(2)
            getattr(model, mode)().zero_grad()
            loss = model(**batch, labels=labels, label_smoothing=smoothing, return_logits=return_logits).loss
            loss.backward()
            yield f"{mode} {smoothing} loss", loss.detach()
            for name, parameter in model.named_parameters():
                yield f"{mode} {smoothing} {name}", None if parameter.grad is None else parameter.grad.clone()
    model.eval().zero_grad()
    for name, settings in SEARCHES.items():
        torch.manual_seed(3)
        yield name, model.generate(**batch, max_new_tokens=12, **settings)
    yield "prompt", model.generate(**batch, decoder_input_ids=labels[:, :2].clamp(min=1), max_new_tokens=6, num_beams=2)
    if heads:
        return  # translated with trees alone
    translator = recnmt_hf.Translator(model, tokenizer, check=False)
    settings = {"beams": 4, "num_hypotheses": 2, "max_length_factor": 0.6, "max_length_extra": 8, "alignments": True}
    for result in translator.translate(sources, **settings):
        for one in result.hypotheses:
            yield f"translation of {result.source}", (one.text, one.score, one.log_prob, one.tokens, one.alignment)
    for score in translator.score(sources, targets):
        yield "score", (score.score, score.token_log_probs)


def all_outputs() -> dict[str, Any]:
    """Return the results of all variants by name."""
    corpus = generate_corpus(train=300, validation=2, test=6, test_deep=2)
    tokenizer = train_tokenizer((text for pair in corpus["train"] for text in pair[:2]), "bpe", 300)
    sentences = [(pair.en, pair.de) for pair in corpus["test"]]
    results: dict[str, Any] = {}
    for fast in ("auto", "0"):
        os.environ["RECNMT_FAST_PATHS"] = fast
        for variant, prefix, fields in variants():
            model = build(prefix, fields, tokenizer)
            for number, (name, value) in enumerate(() if model is None else outputs_of(model, tokenizer, sentences)):
                results[f"{variant}, fast paths {fast}, {number}: {name}"] = value
    return results


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    return bool(one == other) or repr(one) == repr(other)  # lists with NaN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("save", "compare"))
    parser.add_argument("file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = all_outputs()
    if args.action == "save":
        torch.save(results, args.file)
        print(f"{len(results)} results saved")
        return 0
    before = torch.load(args.file, weights_only=True)
    different = [name for name in before | results if not is_equal(before.get(name), results.get(name))]
    values = sum(one.numel() if isinstance(one, torch.Tensor) else 1 for one in results.values())
    print(*different, sep="\n")
    print(f"{len(results)} results with {values} values compared, {len(different)} results different")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
