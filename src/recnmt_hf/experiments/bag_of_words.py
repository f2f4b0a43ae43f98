"""How much of a translation's words a vector of the source foretells: the bag-of-words probe of Weng et al. (2020)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .._plain_text import control_ids
from .._values import Range, check_value
from ..data.text import SentencePair
from ..inference.translator import Translator
from ..models.user_errors import UserError
from .probe_options import ProbeOptions
from .sentence_states import sentence_states


# The vocabulary to which the paper's 200, 500 and 1,000 best words belong.
PAPER_VOCABULARY = 32000
# Ranks the words of the training translations by how often they occur, whatever the source.
FREQUENCY = "frequency"


@dataclass
class WordPrecision:
    """
    Result of a probe.

    Attributes:
        state (`str`): The vector that it read, or `frequency`.
        dim (`int`): The vector's size; 0 for `frequency`.
        precision (`dict[int, float]`): For each K the share of a translation's distinct words among the K that the
            probe takes for the likeliest, the mean over sentences.
        loss (`float`): Mean negative log-probability of a distinct word on the test sentences.
        epochs (`int`): Passes over the training pairs.
    """

    state: str
    dim: int
    precision: dict[int, float]
    loss: float
    epochs: int


class WordProbe(nn.Module):
    """
    `logits = E tanh(W s + b)`: one hidden layer to the target embeddings (the shape of Weng et al., 2017).

    Args:
        embeddings (`torch.Tensor` of shape `(vocab_size, embedding_dim)`): E, the trained model's own, frozen.
        dim (`int`): Of s.
    """

    embeddings: torch.Tensor

    def __init__(self, embeddings: torch.Tensor, dim: int):
        super().__init__()
        self.register_buffer("embeddings", embeddings)
        self.hidden = nn.Linear(dim, embeddings.shape[1])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `(batch_size, vocab_size)` of states `(batch_size, dim)`."""
        return torch.tanh(self.hidden(states)) @ self.embeddings.T


def word_loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """
    The mean negative log-softmax of each sentence's distinct words, `(batch_size,)`.

    Args:
        logits (`torch.Tensor` of shape `(batch_size, vocab_size)`): Of all words.
        words (`torch.Tensor` of shape `(batch_size, most)`): Ids of the sentence's words, -1 behind them.
    """
    is_word = words >= 0
    found = logits.gather(1, words.clamp(min=0)) - logits.logsumexp(dim=1, keepdim=True)
    return -(found * is_word).sum(dim=1) / is_word.sum(dim=1)


def precision_at(logits: torch.Tensor, words: torch.Tensor, tops: Sequence[int]) -> torch.Tensor:
    """
    The share of each sentence's words among the K with the largest logits, `(batch_size, len(tops))`.

    Args:
        logits, words: As for [`word_loss`].
        tops (sequence of `int`): Each K.
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
    """The paper's K, which belong to 32,000 words, for another vocabulary: the same shares of it, at least 1."""
    return [max(1, round(top * vocab_size / PAPER_VOCABULARY)) for top in tops]


def words_of(translator: Translator, targets: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """The distinct words of each translation, without control and unknown tokens."""
    left_out = control_ids(translator.target_tokenizer) | translator.end_ids()
    left_out |= {translator.target_tokenizer.unk_token_id, translator.pad_id()}
    return [torch.tensor(sorted(set(ids) - left_out), dtype=torch.long) for ids in targets]


def probe_words(
    translator: Translator,
    train: Sequence[SentencePair],
    validation: Sequence[SentencePair],
    test: Sequence[SentencePair],
    tops: Sequence[int] = (200, 500, 1000),
    states: Sequence[str] | None = None,
    options: ProbeOptions | None = None,
) -> list[WordPrecision]:
    """
    Trains a probe on each of a model's sentence vectors (Weng et al., 2020, table 5): which words, from the vector
    alone, will the translation have?

    Args:
        translator ([`Translator`]): Of any model; its weights stay as they are.
        train, validation, test (sequences of [`SentencePair`]): Sentences and their reference translations. Words are
            tokens of the target.
        tops (sequence of `int`, *optional*, defaults to `(200, 500, 1000)`): Each K; see [`scaled_tops`].
        states (sequence of `str`, *optional*): Which vectors, as [`states_of`] names them; `None`: all.
        options ([`ProbeOptions`], *optional*): How to train.

    Returns:
        For each vector what its probe found, and first what the most frequent words alone reach.

    Raises:
        ValueError: A set is empty or holds a pair without words, a K is not allowed, or the model has no such vector.
    """
    options = options or ProbeOptions()
    vocabulary = target_embeddings(translator).shape[0]
    tops = [check_value("top", top, int, Range(least=1, most=vocabulary)) for top in tops]
    features, words = [], []
    for name, pairs in (("training", train), ("validation", validation), ("test", test)):
        found, of_set = encoded(translator, pairs, name)
        features.append(found)
        words.append(of_set)
    names = list(features[0])
    for name in states or []:
        if name not in names:
            raise UserError(f"The model gives no state {name!r}. Remedy: choose of {', '.join(names)}.")
    results = [most_frequent(words[0], words[2], vocabulary, tops)]
    for name in states or names:
        results.append(train_probe(translator, name, [each[name] for each in features], words, tops, options))
    return results


def encoded(
    translator: Translator, pairs: Sequence[SentencePair], name: str
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The vectors of a set's sources, and the words of its translations."""
    sources = [translator.encode_source(pair.source) for pair in pairs]
    targets = words_of(translator, (translator.encode_target(pair.target) for pair in pairs))
    for number, (source, words) in enumerate(zip(sources, targets, strict=True), start=1):
        if translator.is_empty(source) or not len(words):
            side = "translation" if not len(words) else "source"
            raise UserError(
                f"Pair {number} of the {name} set: the {side} has no word that the model knows. Remedy: leave it out."
            )
        translator.check_lengths(len(source), 0, f"Pair {number} of the {name} set")
    return sentence_states(translator, sources), targets


def target_embeddings(translator: Translator) -> torch.Tensor:
    """E of the model's decoder, `(vocab_size, embedding_dim)`."""
    model = translator.inspected_model()
    found = getattr(model.get_decoder(), "embed_tokens", None) or model.get_input_embeddings()
    return found.weight.detach().float().cpu()


def padded(words: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True, padding_value=-1)


def most_frequent(
    train: Sequence[torch.Tensor], test: Sequence[torch.Tensor], vocabulary: int, tops: Sequence[int]
) -> WordPrecision:
    """Return the result of always predicting the most frequent words of the training translations."""
    counts = torch.bincount(torch.cat(list(train)), minlength=vocabulary)
    words = padded(test)
    loss = word_loss((counts + 0.5).log().expand(len(test), -1), words).mean().item()
    # Ranks, so that of equally frequent words no more than K are taken.
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
    """Trains a probe on a kind of vector, and measures it on the test sentences with its best weights."""
    device = translator.model.device
    # Vectors of any scale are learnt from alike: W and b can undo the standardization.
    mean, deviation = features[0].mean(dim=0), features[0].std(dim=0, unbiased=False).clamp(min=1e-6)
    features = [(each - mean) / deviation for each in features]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        probe = WordProbe(target_embeddings(translator), features[0].shape[1])
    probe = probe.to(device)
    optimizer = torch.optim.Adam(probe.parameters(), lr=options.learning_rate)
    order = torch.Generator().manual_seed(options.seed)

    def batches(part: int, indices: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for chosen in indices.split(options.batch_size):
            yield (
                probe(features[part][chosen].to(device)),
                padded([words[part][i] for i in chosen.tolist()]).to(device),
            )

    @torch.no_grad()
    def loss_of(part: int) -> float:
        every = torch.arange(len(words[part]))
        return torch.cat([word_loss(*batch) for batch in batches(part, every)]).mean().item()

    best, kept, epoch, waited = float("inf"), copy.deepcopy(probe.state_dict()), 0, 0
    while epoch < options.epochs and waited < options.patience:
        for batch in batches(0, torch.randperm(len(words[0]), generator=order)):
            optimizer.zero_grad()
            word_loss(*batch).mean().backward()
            optimizer.step()
        epoch, waited = epoch + 1, waited + 1
        if (loss := loss_of(1)) < best:
            best, kept, waited = loss, copy.deepcopy(probe.state_dict()), 0
    probe.load_state_dict(kept)
    losses, shares = [], []
    with torch.no_grad():
        for logits, of_batch in batches(2, torch.arange(len(words[2]))):
            losses.append(word_loss(logits, of_batch))
            shares.append(precision_at(logits, of_batch, tops))
    precision = dict(zip(tops, torch.cat(shares).mean(dim=0).tolist(), strict=True))
    return WordPrecision(state, features[0].shape[1], precision, torch.cat(losses).mean().item(), epoch)


def to_tsv(results: Sequence[WordPrecision]) -> str:
    """A table: a row for each vector, a column for each K, in percent."""
    tops = list(results[0].precision)
    rows = [["state", "dim", *(f"top-{top}" for top in tops), "loss", "epochs"]]
    for each in results:
        shares = [f"{100 * each.precision[top]:.2f}" for top in tops]
        rows.append([each.state, str(each.dim), *shares, f"{each.loss:.4f}", str(each.epochs)])
    return "".join("\t".join(row) + "\n" for row in rows)
