"""A model that is made to say given translations: their probabilities, and what it attends to meanwhile."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .._plain_text import is_blank
from ..data.tokenizer_pair import TokenizerPair
from ..models.user_errors import UserError
from .attention_links import token_links
from .eval_mode import eval_mode
from .model_checks import check_weights
from .options import DecodingOptions, decoding_options
from .results import SentenceScore


logger = logging.get_logger(__name__)

# Above this share of unknown tokens there is a warning.
UNKNOWN_SHARE = 0.01


class ForcedDecoder:
    """
    Scores and aligns sentences with translations of them.

    Args:
        model (`PreTrainedModel`): An encoder-decoder.
        tokenizer (`PreTrainedTokenizerBase`): Of the source, and of the target unless that has its own.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the target.
        check (`bool`, *optional*, defaults to `True`): Whether weights that are not finite and tokenizers that are not
            the model's own are refused ([`~recnmt_hf.data.tokenizer_checks.check_tokenizers`] says how those are
            found); `False` leaves the looking to the caller.

    Raises:
        ValueError: The weights are not finite, or a tokenizer is not the model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        check: bool = True,
    ):
        self.model = model
        self.tokenizers = TokenizerPair(tokenizer, target_tokenizer)
        if check:
            check_weights(model)
        self.tokenizers.check(model, strict=check)
        self.control_ids = self.tokenizers.control_ids()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizers.source

    @property
    def target_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizers.target

    def inspected_model(self) -> Any:
        """
        Return the model for reading its attentions, states or weights.

        Raises:
            ValueError: It was exported to an engine, which gives none of them.
        """
        if engine := getattr(self.model, "exported_to", None):
            raise UserError(
                f"{self.model.name_or_path} was exported to {engine}, which gives no alignments, attentions or states: "
                "it translates and scores only. Remedy: use the model that it was exported from."
            )
        return self.model

    # -- scores ------------------------------------------------------------------------------------------------------

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str | Sequence[int]],
        options: DecodingOptions | None = None,
        places: Sequence[str] | None = None,
        **changes: Any,
    ) -> list[SentenceScore]:
        """
        The model's log-probabilities of given translations, as `translate` reports them.

        Args:
            sources (sequence of `str`): Source sentences.
            targets (sequence of `str`, or of token ids as in [`Hypothesis`]): Their translations.
            options ([`DecodingOptions`], *optional*): Length penalty and batch size.
            places (sequence of `str`, *optional*): Where each pair comes from, for messages; `None`: its number.

        Raises:
            ValueError: There are not as many sources as targets, or a source is empty.
        """
        options = decoding_options(options, changes)
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources and {len(targets)} translations: there must be one for each.")
        source_ids, target_ids = [], []
        unknown = UnknownTokens(self.tokenizer)
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
            names = [f"{side} {number}" for side in ("Source", "Translation", "Pair")]
            if places is not None:
                names = [f"{places[number - 1]}: {side}" for side in ("the source", "the translation", "the pair")]
            self.check_text(source, names[0])
            ids = [] if is_blank(source) else self.encode_source(source)
            if self.is_empty(ids):
                raise UserError(f"{names[0]} is empty and has no probability. Remedy: remove the pair.")
            unknown.count(ids)
            source_ids.append(ids)
            target_ids.append(self.target_ids(target, names[1]))
            self.check_lengths(len(ids), len(target_ids[-1]), names[2])
        unknown.warn()
        penalty = options.penalty()
        found = self.score_tokens(source_ids, target_ids, options.max_tokens)
        return [SentenceScore(sum(each) / max(len(each), 1) ** penalty, sum(each), each) for each in found]

    def score_tokens(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 4096
    ) -> list[list[float]]:
        """Log-probability of every target token, by forced decoding of token ids in batches of bounded size."""
        results: list[list[float]] = [[] for _ in targets]
        lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
        for batch in batches_by_tokens(lengths, max_tokens):
            input_ids, attention_mask = self.pad([sources[i] for i in batch], self.tokenizer.pad_token_id)
            labels, _ = self.pad([targets[i] for i in batch], self.pad_id())
            with eval_mode(self.model):
                logits = self.model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    decoder_input_ids=self.shift(labels),
                    use_cache=False,
                ).logits
            logits = logits if logits.dtype == torch.float64 else logits.float()
            log_probs = logits.gather(-1, labels[:, :, None])[:, :, 0] - logits.logsumexp(dim=-1)
            for i, row in zip(batch, log_probs.tolist(), strict=True):
                results[i] = row[: len(targets[i])]
        return results

    # -- attention ---------------------------------------------------------------------------------------------------

    def align_tokens(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        layer: int | str | None = None,
        max_tokens: int = 4096,
    ) -> list[list[tuple[int, int]]]:
        """
        At most one link per target token, by the rule of [`align_pairs`] with each token as a word of its own: to the
        source token with the largest attention, averaged over the heads of a decoder layer; none where that is the
        source's end token, and none for the end token of the target.
        """
        links: list[list[tuple[int, int]]] = [[] for _ in targets]
        lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
        controls = self.control_ids[0], self.control_ids[1] | self.end_ids()
        for batch in batches_by_tokens(lengths, max_tokens):
            batch_sources, batch_targets = [sources[i] for i in batch], [targets[i] for i in batch]
            attentions = self.attention(batch_sources, batch_targets)
            found = token_links(attentions, batch_sources, batch_targets, controls, layer)
            for i, of_sentence in zip(batch, found, strict=True):
                links[i] = of_sentence
        return links

    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """
        Cross-attention of forced decoding, for each decoder layer `(batch_size, num_heads, target_length,
        source_length)`; row j is that of the step which says target token j.

        Raises:
            ValueError: The model has no attention to source words.
        """
        model = self.inspected_model()
        input_ids, attention_mask = self.pad(sources, self.tokenizer.pad_token_id)
        labels, _ = self.pad(targets, self.pad_id())
        # The encoder's own attentions, and what else it could return, are not asked for: they may be large.
        with eval_mode(model):
            attentions = model(
                encoder_outputs=model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask),
                attention_mask=attention_mask,
                decoder_input_ids=self.shift(labels),
                use_cache=False,
                output_attentions=True,
            ).cross_attentions
        if not attentions or attentions[0] is None:
            if getattr(self.model.config, "attends_source_words", True):
                raise UserError(
                    "The model gives no attention to source words to align by. Remedy: load it with "
                    "attn_implementation='eager'."
                )
            raise UserError(
                "The model's decoder attends no source words to align by: its configuration gives it another memory "
                "alone. Remedy: use a model whose decoder attends the encoder's states."
            )
        return attentions

    # -- tokens ------------------------------------------------------------------------------------------------------

    def encode_source(self, sentence: str) -> list[int]:
        """Token ids, in which `</s>` and the like in the sentence are text."""
        return self.tokenizers.encode_source(sentence)

    def encode_target(self, sentence: str) -> list[int]:
        """Token ids, in which `</s>` and the like in the sentence are text."""
        return self.tokenizers.encode_target(sentence)

    def target_ids(self, target: str | Sequence[int], place: str) -> list[int]:
        """Token ids of a translation that is text or token ids; `ValueError` names those that do not exist."""
        if isinstance(target, str):
            self.check_text(target, place)
            return self.encode_target(target)
        rows = getattr(self.model.config, "decoder_vocab_size", None) or self.model.config.vocab_size
        ids = list(target) if isinstance(target, Iterable) else [target]
        for id in ids:
            if not hasattr(id, "__index__") or isinstance(id, float) or not 0 <= id < rows:
                raise UserError(f"{place}: {id!r} is no token id of 0 to {rows - 1}. Remedy: give the model's own ids.")
        return [operator.index(id) for id in ids]

    def says_nothing(self, sentence: str) -> bool:
        """Whether a source has no visible character, or none that its tokenizer keeps: its translation is empty."""
        return is_blank(sentence) or self.is_empty(self.encode_source(sentence))

    def is_empty(self, ids: Sequence[int]) -> bool:
        """Whether a source's encoding holds nothing but control tokens."""
        return all(id in self.control_ids[0] for id in ids)

    def check_text(self, sentence: object, place: str) -> None:
        """Raises `ValueError` for what is no text, or text that no file can hold."""
        if not isinstance(sentence, str):
            raise UserError(f"{place} is no text but {sentence!r}. Remedy: give sentences.")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{place} holds half a character ({error.object[error.start]!a}): {sentence[:60]!a}. Remedy: correct "
                "how the text was read; UTF-8 has no such characters."
            ) from error

    def check_lengths(self, source: int, target: int, place: str) -> None:
        """Raises `ValueError` where a pair of sentences has more tokens than the model positions."""
        most = self.longest_source(), self.longest_target()
        for side, length, limit in zip(("source", "target"), (source, target), most, strict=True):
            limit = None if limit is None else limit + (side == "target")  # the last one is not read any more
            if limit is not None and length > limit:
                raise UserError(f"{place} has {length} {side} tokens, the model takes {limit}. Remedy: shorten it.")

    def pad(self, rows: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-padded ids and their mask, on the model's device."""
        width = max(max(map(len, rows)), 1)
        ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return ids.to(self.model.device), mask.to(self.model.device)

    def shift(self, labels: torch.Tensor) -> torch.Tensor:
        """The decoder's input for labels `(batch_size, target_length)`."""
        start = self.model.generation_config.decoder_start_token_id
        start = self.model.config.decoder_start_token_id if start is None else start
        return torch.cat([labels.new_full((labels.shape[0], 1), start), labels[:, :-1]], dim=1)

    def pad_id(self) -> int:
        return self.target_tokenizer.pad_token_id

    def end_ids(self) -> set[int]:
        end = self.model.generation_config.eos_token_id
        end = self.model.config.eos_token_id if end is None else end
        return set(end) if isinstance(end, (list, tuple)) else {end}

    def strip(self, row: list[int]) -> list[int]:
        """
        A generated row up to its end token; of one without, up to the padding. Rows are cut at their limit before:
        beam search may fill up cut hypotheses with end tokens.
        """
        ends = self.end_ids()
        for i, token in enumerate(row):
            if token in ends:
                return row[: i + 1]
        while row and row[-1] == self.pad_id():
            row = row[:-1]
        return row

    def longest_source(self) -> int | None:
        """Source tokens that the model's positions allow; `None`: any number."""
        return self.positions("source")

    def longest_target(self) -> int | None:
        """New target tokens that the model's positions allow; `None`: any number."""
        limit = self.positions("target")
        return None if limit is None else limit - 1

    def positions(self, side: str) -> int | None:
        """Rows of the table of positions of a side; `None` where there is none."""
        config = self.model.config
        if side not in getattr(config, "sides_with_positions", (side,)):  # transformers' own models do not say
            return None
        return getattr(config, "max_position_embeddings", None)


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first, each within `max_tokens` including padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(lengths[order[start]], 1))
        yield order[start : start + size]
        start += size


class UnknownTokens:
    """Counts the tokens of a text that its tokenizer does not know."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.unknown_id = tokenizer.unk_token_id
        self.unknown = self.total = 0

    def count(self, ids: Sequence[int]) -> None:
        self.total += len(ids)
        self.unknown += ids.count(self.unknown_id)

    def warn(self) -> None:
        """Says so where it is more than a few."""
        if self.unknown > UNKNOWN_SHARE * self.total:
            logger.warning_once(
                f"{100 * self.unknown / self.total:.1f}% of the source tokens are unknown to the tokenizer, and the "
                "model cannot tell them apart. Remedy: a model whose tokenizer knows this language and script."
            )
