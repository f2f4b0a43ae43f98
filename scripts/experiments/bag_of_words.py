#!/usr/bin/env python
"""
Bag-of-words probe of Weng et al. (2020): prediction of a translation's words from a vector of the source.

    python scripts/experiments/bag_of_words.py outputs/gret/model --train train.en train.de \\
        --validation val.en val.de --test test.en test.de
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import islice

import torch
from sentence_states import ProbeOptions, optional_output, states_of, train_with_early_stopping, vectors_by_name
from torch import nn

from recnmt_hf import Translator
from recnmt_hf._plain_text import control_ids
from recnmt_hf.commands import arguments
from recnmt_hf.data.corpora import load_pairs
from recnmt_hf.data.text import SentencePair, tsv
from recnmt_hf.errors import UserError
from recnmt_hf.inference.model_settings import end_ids


# Vocabulary of the paper, of which it takes the best 200, 500 and 1,000 words.
PAPER_VOCABULARY, PAPER_TOPS = 32000, (200, 500, 1000)
OPTIONS = [field.name for field in fields(ProbeOptions)]
# Name of the baseline that always predicts the most frequent words of the training translations.
FREQUENCY = "frequency"
SETS = ("training", "validation", "test")
# Values of sentences, `(batch_size, ...)`, by logits and words.
Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class WordPrecision:
    """Result of a probe."""

    state: str  # name of the vector, or `frequency`
    dim: int  # size of the vector; 0 for `frequency`
    # K -> share of a translation's distinct words among the K most likely words, the mean over sentences
    precision: dict[int, float]
    loss: float  # mean negative log-probability of a distinct word on the test sentences
    epochs: int  # passes over the training pairs


class WordProbe(nn.Module):
    """
    `logits = E tanh(W s + b)`: one hidden layer before the target embeddings (as in Weng et al., 2017), which are those
    of the trained model, `(vocab_size, embedding_dim)`, and frozen. `dim` is the size of s.
    """

    embeddings: torch.Tensor

    def __init__(self, embeddings: torch.Tensor, dim: int):
        super().__init__()
        self.register_buffer("embeddings", embeddings)
        self.hidden = nn.Linear(dim, embeddings.shape[1])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(batch_size, vocab_size)` of states `(batch_size, dim)`."""
        return torch.tanh(self.hidden(states)) @ self.embeddings.T


def word_loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """
    Return the mean negative log-softmax of each sentence's distinct words, `(batch_size,)`, by the logits of all words
    `(batch_size, vocab_size)` and the ids of the sentence's words `(batch_size, longest)`, padded with -1.
    """
    is_word = words >= 0
    log_probabilities = logits.gather(1, words.clamp(min=0)) - logits.logsumexp(dim=1, keepdim=True)
    return -(log_probabilities * is_word).sum(dim=1) / is_word.sum(dim=1)


def precision_at(logits: torch.Tensor, words: torch.Tensor, tops: Sequence[int]) -> torch.Tensor:
    """
    Return the share of each sentence's words among the K with the largest logits, `(batch_size, len(tops))`, for each K
    of `tops`; `logits` and `words` are those of [`word_loss`].
    """
    is_word = words >= 0
    # A word is among the K best if fewer than K have a larger logit.
    own = logits.gather(1, words.clamp(min=0))
    ordered = logits.topk(min(max(tops), logits.shape[1]), dim=1).values
    shares = []
    for top in tops:
        least = ordered[:, min(top, ordered.shape[1]) - 1, None]
        shares.append(((own >= least) & is_word).sum(dim=1) / is_word.sum(dim=1))
    return torch.stack(shares, dim=1)


def scaled_tops(tops: Sequence[int], vocab_size: int) -> list[int]:
    """Return for each K of the paper, which has 32,000 words, the same share of another vocabulary, at least 1."""
    return [max(1, round(top * vocab_size / PAPER_VOCABULARY)) for top in tops]


def words_of(translator: Translator, targets: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Return the distinct words of each translation, without control and unknown tokens."""
    ignored = control_ids(translator.target_tokenizer) | end_ids(translator.model)
    ignored |= {translator.target_tokenizer.unk_token_id, translator.target_tokenizer.pad_token_id}
    return [torch.tensor(sorted(set(ids) - ignored), dtype=torch.long) for ids in targets]


def probe_words(
    translator: Translator,
    train: Sequence[SentencePair],
    validation: Sequence[SentencePair],
    test: Sequence[SentencePair],
    tops: Sequence[int] = PAPER_TOPS,
    states: Sequence[str] | None = None,
    options: ProbeOptions | None = None,
) -> list[WordPrecision]:
    """
    Train a probe on each of a model's sentence vectors to predict the words of the translation, which are tokens of the
    target (Weng et al., 2020, table 5). `tops` are all K (see [`scaled_tops`]), and `states` the names of the vectors,
    as in [`states_of`]; by default all.

    Returns:
        The result of the most frequent words, then one for each vector.

    Exit with a message if a set is empty or has a pair without words, a K exceeds the vocabulary, or the model has no
    such vector.
    """
    options = options or ProbeOptions()
    vocabulary = target_embeddings(translator).shape[0]
    if max(tops) > vocabulary:
        raise SystemExit(f"--top {max(tops)} exceeds the vocabulary of {vocabulary} words")
    sets = [encoded(translator, pairs, name) for name, pairs in zip(SETS, (train, validation, test), strict=True)]
    features, words = [vectors for vectors, _ in sets], [set_words for _, set_words in sets]
    for name in states or ():
        if name not in features[0]:
            raise SystemExit(f"The model has no vector {name!r}; choose from {', '.join(features[0])}")
    results = [most_frequent(words[0], words[2], vocabulary, tops)]
    for name in states or features[0]:
        results.append(train_probe(translator, name, [vectors[name] for vectors in features], words, tops, options))
    return results


def encoded(
    translator: Translator, pairs: Sequence[SentencePair], name: str
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the vectors of a set's sources, and the words of its translations."""
    targets = words_of(translator, (translator.encode_target(pair.target).ids for pair in pairs))
    for number, words in enumerate(targets, start=1):
        if not len(words):
            raise SystemExit(f"Pair {number} of the {name} set: the translation has no word of the model's vocabulary")
    sources = [pair.source for pair in pairs]
    place = f"Pair {{}} of the {name} set"
    return vectors_by_name(translator, sources, lambda output, _, mask: states_of(output, mask), place), targets


def target_embeddings(translator: Translator) -> torch.Tensor:
    """Return E of the model's decoder, `(vocab_size, embedding_dim)`."""
    model = translator.inspected_model()
    embeddings = getattr(model.get_decoder(), "embed_tokens", None) or model.get_input_embeddings()
    return embeddings.weight.detach().float().cpu()


def padded(words: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the words of several sentences, padded with -1."""
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True, padding_value=-1)


def most_frequent(
    train: Sequence[torch.Tensor], test: Sequence[torch.Tensor], vocabulary: int, tops: Sequence[int]
) -> WordPrecision:
    """Return the result of always predicting the most frequent words of the training translations."""
    counts = torch.bincount(torch.cat(list(train)), minlength=vocabulary)
    words = padded(test)
    loss = word_loss((counts + 0.5).log().expand(len(test), -1), words).mean().item()
    # Ranks instead of counts, so that equally frequent words do not exceed K.
    ranks = torch.empty(vocabulary)
    ranks[counts.argsort(descending=True, stable=True)] = -torch.arange(vocabulary, dtype=torch.float32)
    shares = precision_at(ranks.expand(len(test), -1), words, tops).mean(dim=0).tolist()
    return WordPrecision(FREQUENCY, 0, dict(zip(tops, shares, strict=True)), loss, 0)


def train_probe(
    translator: Translator,
    state: str,
    features: Sequence[torch.Tensor],
    words: Sequence[Sequence[torch.Tensor]],
    tops: Sequence[int],
    options: ProbeOptions,
) -> WordPrecision:
    """Train a probe on one vector, and evaluate it on the test sentences with its best weights."""
    device = translator.model.device
    # The scale of the vectors has no effect: W and b can undo the standardization.
    mean, deviation = features[0].mean(dim=0), features[0].std(dim=0, unbiased=False).clamp(min=1e-6)
    features = [((vectors - mean) / deviation).to(device) for vectors in features]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        probe = WordProbe(target_embeddings(translator), features[0].shape[1])
    probe = probe.to(device)

    def of_batch(measure: Measure, part: int, batch: torch.Tensor) -> torch.Tensor:
        return measure(probe(features[part][batch]), padded([words[part][i] for i in batch.tolist()]).to(device))

    @torch.no_grad()
    def mean_of(measure: Measure, part: int) -> torch.Tensor:
        batches = torch.arange(len(words[part])).split(options.batch_size)
        return torch.cat([of_batch(measure, part, batch) for batch in batches]).mean(dim=0)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return of_batch(word_loss, 0, batch).mean()

    *_, epochs = train_with_early_stopping(probe, loss, lambda: -mean_of(word_loss, 1).item(), len(words[0]), options)
    precision = dict(zip(tops, mean_of(partial(precision_at, tops=tops), 2).tolist(), strict=True))
    return WordPrecision(state, features[0].shape[1], precision, mean_of(word_loss, 2).item(), epochs)


def to_tsv(results: Sequence[WordPrecision]) -> str:
    """Return a table: a row for each vector, a column for each K, in percent."""
    rows = [["state", "dim", *(f"top-{top}" for top in results[0].precision), "loss", "epochs"]]
    for result in results:
        shares = [f"{100 * share:.2f}" for share in result.precision.values()]
        rows.append([result.state, str(result.dim), *shares, f"{result.loss:.4f}", str(result.epochs)])
    return tsv(rows)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    description = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = arguments.Parser(prog="bag_of_words.py", **description)
    add = parser.add_argument
    add("model", help=arguments.MODEL_HELP)
    for name in ("train", "validation", "test"):
        add(f"--{name}", nargs=2, required=True, metavar=("SOURCE", "TARGET"), help=f"line-aligned {name} files")
    add("--states", nargs="+", help="vectors to probe: last, average, global, ... (default: all vectors of the model)")
    top = (
        "numbers of most likely words to compare with the translation (default: 200, 500 and 1000 as in the paper and "
        "scaled from 32,000 words to the model's vocabulary)"
    )
    add("--top", type=arguments.whole(1), nargs="+", help=top)
    add("--sentences", type=arguments.whole(1), help="maximum number of training pairs (default: all)")
    arguments.add_options(parser, ProbeOptions, OPTIONS)
    add("--output", "-o", help="file to which the table is also written")
    add("--json", help="JSON file for all figures (default: none)")
    arguments.add_device_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    inputs = [*args.train, *args.validation, *args.test]
    options = arguments.read_options(ProbeOptions, args, OPTIONS)
    files = (dict(zip(("source", "target"), paths, strict=True)) for paths in (args.train, args.validation, args.test))
    train, validation, test = (load_pairs(pair, "source", "target") for pair in files)
    train, validation, test = list(islice(train, args.sentences)), list(validation), list(test)
    with optional_output(args.output, inputs) as table, optional_output(args.json, inputs) as figures:
        translator = arguments.load_translator(args)
        tops = args.top
        if tops is None:
            vocabulary = len(target_embeddings(translator))
            tops = {*(top for top in PAPER_TOPS if top <= vocabulary), *scaled_tops(PAPER_TOPS, vocabulary)}
        results = probe_words(translator, train, validation, test, sorted(tops), args.states, options)
        print(to_tsv(results), end="")
        if table is not None:
            table.write(to_tsv(results))
        if figures is not None:
            json.dump([asdict(result) for result in results], figures, indent=2)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bag_of_words.py: {error}")
