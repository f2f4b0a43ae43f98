"""Extensions of `generate`: Vaswani's length penalty, limits and prefixes for each sentence, sampling with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor, StoppingCriteria

from ..models.decoder_cache import concat_rows


class VaswaniLengthPenalty(float):
    """
    Length penalty `((5 + length) / 6) ** alpha` (Wu et al., 2016, Eq. 14; Vaswani et al., 2017, section 6.1) as a
    value of `generate`'s `length_penalty`: transformers divides a log-probability by `length ** length_penalty`, so
    `7 ** VaswaniLengthPenalty(1.0)` is 2.
    """

    def __rpow__(self, length: float, modulo: None = None) -> float:
        return ((5.0 + length) / 6.0) ** float(self)


# Type of a length penalty -> class of its exponent; `length ** exponent` is the divisor, and counts the end token.
LENGTH_PENALTIES: dict[str, type[float]] = {"vaswani": VaswaniLengthPenalty, "hf": float}


class PerSentence:
    """Base class of processors and criteria with values for each sentence of a batch."""

    state: tuple[str, ...] = ("limits",)  # tensors with a row for each sentence

    def keep_sentences(self, sentences: torch.Tensor) -> None:
        """Keep the sentences at these indices of the batch."""
        for name in self.state:
            tensor = getattr(self, name)
            setattr(self, name, tensor.index_select(0, sentences.to(tensor.device)))

    def add_sentences(self, other: PerSentence) -> None:
        """Add those of another batch."""
        for name in self.state:
            setattr(self, name, concat_rows(getattr(self, name), getattr(other, name), -1))

    def of_rows(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the value of each row of a batch, which has as many consecutive rows for each sentence."""
        return values.to(rows.device).repeat_interleave(rows.shape[0] // values.shape[0])


class MaxLengthPerSentence(PerSentence, StoppingCriteria):
    """
    Stopping criterion with a limit for each sentence, so that a translation does not depend on its batch.

    Args:
        limits (`torch.LongTensor` of shape `(num_sentences,)`): Maximum numbers of new tokens, end token included.
        prompt_length (`int`, *optional*, defaults to 1): Number of decoder tokens before the first new one.
    """

    def __init__(self, limits: torch.Tensor, prompt_length: int = 1):
        self.limits = limits
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        return self.of_rows(self.limits, input_ids) <= input_ids.shape[1] - self.prompt_length


class PrefixPerSentence(PerSentence, LogitsProcessor):
    """
    Logits processor that forces a prefix for each sentence. Scores of its tokens are the model's own.

    Args:
        prefixes (sequence of sequences of `int`): Token ids for each sentence; may be empty.
        prompt_length (`int`, *optional*, defaults to 1): Number of decoder tokens before the first new one.
        given (sequence of `int`, *optional*): Number of first tokens of each prefix that the model does not predict,
            such as that of the target language. Their score is 0, as that of `forced_bos_token_id`.
    """

    state = ("prefixes", "given")
    # Score of prefix tokens that another processor forbids; finite, since one token must remain.
    LEAST = -1e4

    def __init__(self, prefixes: Sequence[Sequence[int]], prompt_length: int = 1, given: Sequence[int] | None = None):
        self.prompt_length = prompt_length
        self.given = torch.tensor(given or [0] * len(prefixes))
        width = max(map(len, prefixes))
        padded = [list(prefix) + [-1] * (width - len(prefix)) for prefix in prefixes]
        self.prefixes = torch.tensor(padded, dtype=torch.long)  # also if all are empty

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        step = input_ids.shape[1] - self.prompt_length
        if step >= self.prefixes.shape[1]:
            return scores
        forced = self.of_rows(self.prefixes[:, step], scores)[:, None]
        tokens = forced.clamp(min=0)
        is_given = self.of_rows(self.given > step, scores)[:, None]
        own = scores.gather(1, tokens).clamp(min=self.LEAST).masked_fill(is_given, 0.0)
        masked = torch.full_like(scores, -torch.inf).scatter(1, tokens, own)
        return torch.where(forced < 0, scores, masked)


class EndPerSentence(PerSentence, LogitsProcessor):
    """Forces an end token at the limit of each sentence, as `forced_eos_token_id` does at that of the batch."""

    def __init__(self, ends: int | Sequence[int], limits: Sequence[int]):
        self.ends = [ends] if isinstance(ends, int) else list(ends)
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        is_last = self.limits == input_ids.shape[1]  # the start token takes the place of the token to come
        if not is_last.any():
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ends] = 0.0
        return torch.where(self.of_rows(is_last, scores)[:, None], forced, scores)


class SeededDraws(TorchFunctionMode):
    """Context of a thread in which `generate` draws as after `torch.manual_seed`, from generators of its own."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.multinomial, torch.rand_like):
            return func(*args, **(kwargs or {}))
        like, device = args[0], args[0].device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        own: dict[str, Any] = {"generator": self.generators[device]}
        if func is torch.rand_like:  # assisted decoding accepts drafts by it
            return torch.rand(like.shape, device=device, dtype=like.dtype, **own)
        return func(*args, **own, **(kwargs or {}))
