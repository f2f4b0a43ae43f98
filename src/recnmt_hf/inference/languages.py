"""Source and target languages of a model, named by control tokens, tags in the source, or text in front of it."""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .._plain_text import ids_of_texts
from ..data.languages import (
    MOST_CODES,
    find_code,
    known_code,
    language_ids,
    list_names,
    main_language,
    require_language,
    same,
)
from ..data.records import Tokens
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError
from .model_settings import ModelTask, setting


logger = logging.get_logger(__name__)

# Tokens of a source that name the language of the translation: `>>deu<<` (OPUS-MT), `<2de>` (MADLAD-400).
TAG = re.compile(r">>([\w-]+)<<|<2([A-Za-z][\w-]*)>")
TYPED_TAG = re.compile(rf"\s*({TAG.pattern})")
TASK_NAME = re.compile(r"translation_([\w-]+?)_to_([\w-]+)")  # in `task_specific_params`, as of T5
# Encoding changes the state of a tokenizer (source or target, language, truncation), so threads take turns.
TOKENIZING = threading.RLock()


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False, is_target: bool = False
) -> list[int]:
    """Return the token ids of a text, in which `</s>` and the like are text."""
    with TOKENIZING:
        return list(ids_of_texts(tokenizer, [text], is_target, add_special_tokens)[0])


@dataclass(frozen=True)
class Direction:
    """Languages of a sentence (the source's is also used to split sentences), and how the model is told about them."""

    source: str | None = None
    target: str | None = None
    before: tuple[int, ...] = ()  # control tokens before the source
    after: tuple[int, ...] = ()  # and after it
    tags: tuple[int, ...] = ()  # tokens between `before` and the source: languages, and tags of the user
    instruction: str = ""  # text in front of the source
    start: int | None = None  # first input of the decoder, if it is not the model's own
    given: tuple[int, ...] = ()  # tokens that each translation begins with, not predicted by the model

    def enclose(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of a source with control tokens."""
        return [*self.before, *self.tags, *ids, *self.after]

    def opening(self, prefix: Sequence[int] = ()) -> Tokens:
        """Return the tokens that a translation begins with; `prefix` is the user's, as encoded in this direction."""
        opening = list(prefix or self.given)
        is_given = opening[: len(self.given)] == list(self.given)
        return Tokens(opening, start=self.start, given=len(self.given) if is_given else 0)


class Languages:
    """
    Languages of a model: codes of the source languages among which it must be given one (`sources`), and of the target
    languages among which one can be chosen (`targets`). This class is for models of one direction, or without names.
    """

    # Whether the token of the target replaces the control tokens that the tokenizer puts before a target.
    names_targets = False

    def __init__(self, tokenizers: TokenizerPair, model: Any, task: ModelTask, ids: Mapping[str, int]):
        self.tokenizers, self.model, self.task = tokenizers, model, task
        self.ids, self.codes = dict(ids), {id: code for code, id in ids.items()}
        self.sources: list[str] = sorted(ids) if self.names_targets else []
        self.targets: list[str] = sorted(ids)
        self.control_ids = set(self.codes)  # of tokens that name languages

    def direction(self, source: str | None, target: str | None, forced: int | None = None) -> Direction:
        """Return the direction of two languages; by default those of tokenizer and files. `forced` is a first token."""
        for side, code in (("source", source), ("target", target)):
            known = self.named_codes(side)
            if side == "source":  # longer codes may be those of a group of languages (`mul`, `ROMANCE`)
                known = [one for one in known if len(main_language(one)) == 2] or [code or ""]
            if code is not None:
                is_known = main_language(code) in map(main_language, known)
                require_language(is_known, f"{side}_lang", code, known or ["none is recorded"])
        first = setting(self.model, "forced_bos_token_id") if forced is None else forced
        source = source or self.task.source_lang or getattr(self.tokenizers.source, "source_lang", None)
        return Direction(source, target, *self.frame, given=() if first is None else (first,))

    def require_target(self, direction: Direction) -> None:
        """Raise `UserError` if a model that needs a target language has none."""

    def named_codes(self, side: str) -> list[str]:
        """Return the codes by which the tokenizer and the model's files name the only language of a side."""
        named = (getattr(getattr(self.tokenizers, side), f"{side}_lang", None), getattr(self.task, f"{side}_lang"))
        return list(dict.fromkeys(code for code in named if code))

    def read_target(self, sentence: str) -> tuple[str | None, str]:
        """Return the target language that a sentence names at its beginning, if any, and the rest."""
        return None, sentence

    @cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Control tokens that the tokenizer adds before and after a source."""
        tokenizer = self.tokenizers.source
        text = next(token for token in ("a", "1", ".", *tokenizer.get_vocab()) if encode_text(tokenizer, token))
        whole, ids = encode_text(tokenizer, text, True), encode_text(tokenizer, text)
        starts = range(len(whole) - len(ids) + 1)
        place = next((i for i in starts if whole[i : i + len(ids)] == ids), len(whole) - len(ids))
        return tuple(whole[:place]), tuple(whole[place + len(ids) :])


class TokenLanguages(Languages):
    """
    Languages whose tokens the tokenizer adds to a source: M2M-100, NLLB, mBART, mBART-50. The token of the target is
    the decoder's first input if the model has no other one of its own, else the first token of each translation.
    """

    names_targets = True

    def direction(self, source: str | None, target: str | None, forced: int | None = None) -> Direction:
        tokenizer: Any = self.tokenizers.source
        code = known_code(source, self.ids, "source_lang") if source else find_code(tokenizer.src_lang or "", self.ids)
        frame = self.frame
        if code is not None:
            before, after = ([self.ids[code] if id in self.codes else id for id in part] for part in frame)
            frame = (tuple(before), tuple(after))
        if forced is not None:
            return Direction(code, self.codes.get(forced), *frame, given=(forced,))
        start = setting(self.model, "decoder_start_token_id")
        if target is not None:
            target = known_code(target, self.ids, "target_lang")
        else:  # some tokenizers take on the source language when they encode a target without a language
            named = (self.codes.get(id) for id in (setting(self.model, "forced_bos_token_id"), start))
            own = find_code(getattr(self.tokenizers.target, "tgt_lang", None) or "", self.ids)
            target = next((one for one in named if one is not None), None if own == code else own)
        direction = Direction(code, target, *frame)
        if target is None:
            return direction
        if start is None or start in self.codes:
            return replace(direction, start=self.ids[target])
        return replace(direction, given=(self.ids[target],))

    def require_target(self, direction: Direction) -> None:
        if direction.target is None and not direction.given:
            known = list_names(self.targets, MOST_CODES)
            raise UserError(f"missing (tgt_lang, --target-lang). Use one of {known}.", field="target_lang")


class TagLanguages(Languages):
    """Languages of the target that a token in front of the source names: `>>deu<<` (OPUS-MT), `<2de>` (MADLAD-400)."""

    def direction(self, source: str | None, target: str | None, forced: int | None = None) -> Direction:
        code = None if target is None else find_code(target, self.ids)
        is_known = target is None or code is not None or target in self.named_codes("target")
        require_language(is_known, "target_lang", target or "", self.ids)
        direction = super().direction(source, None, forced)
        return direction if code is None else replace(direction, target=code, tags=(self.ids[code],))

    def require_target(self, direction: Direction) -> None:
        # Some models with tags also translate without.
        if direction.target is None and len(self.ids) > 1:
            logger.warning_once(
                f"This model translates into several languages ({list_names(self.targets, MOST_CODES)}), and a "
                "sentence names none. Pass target_lang."
            )

    def read_target(self, sentence: str) -> tuple[str | None, str]:
        match = TYPED_TAG.match(sentence)
        return (match[2] or match[3], sentence[match.end() :].lstrip()) if match else (None, sentence)


class TaskLanguages(Languages):
    """Pairs of languages with a text before the source, as of T5: `task_specific_params` of the configuration."""

    def __init__(self, tokenizers: TokenizerPair, model: Any, task: ModelTask, prefixes: dict[tuple[str, str], str]):
        super().__init__(tokenizers, model, task, {})
        self.prefixes = prefixes
        self.sources, self.targets = (sorted({pair[side] for pair in prefixes}) for side in (0, 1))

    def direction(self, source: str | None, target: str | None, forced: int | None = None) -> Direction:
        direction = super().direction(source, None, forced)
        if target is None:
            return direction
        pairs = [pair for pair in self.prefixes if same(pair[1], target) and (not source or same(pair[0], source))]
        field, name = "target_lang", target
        if source is not None:
            field, name = "source_lang to target_lang", f"{source} to {target}"
        require_language(len(pairs) == 1, field, name, map(" to ".join, self.prefixes))
        ((source, target),) = pairs
        return replace(direction, source=source, target=target, instruction=self.prefixes[source, target])

    def read_target(self, sentence: str) -> tuple[str | None, str]:
        for (_, target), prefix in self.prefixes.items():
            if sentence.startswith(prefix):
                return target, sentence[len(prefix) :]
        return None, sentence


def find_languages(tokenizers: TokenizerPair, model: Any, task: ModelTask) -> Languages:
    """Return the languages of a model, by what its tokenizer and its configuration name."""
    with TOKENIZING:
        ids = language_ids(tokenizers.source)
    if ids:  # a tokenizer with `src_lang` and `tgt_lang` whose sources have a language's token
        return TokenLanguages(tokenizers, model, task, ids)
    matches = ((TAG.fullmatch(token), id) for token, id in tokenizers.source.get_vocab().items())
    if tags := {match[1] or match[2]: id for match, id in matches if match}:
        return TagLanguages(tokenizers, model, task, tags)
    tasks = getattr(model.config, "task_specific_params", None)
    prefixes = {}
    for name, settings in tasks.items() if isinstance(tasks, Mapping) else ():
        match, prefix = TASK_NAME.fullmatch(name), isinstance(settings, Mapping) and settings.get("prefix")
        if match and prefix:
            prefixes[match[1], match[2]] = str(prefix)
    return TaskLanguages(tokenizers, model, task, prefixes) if prefixes else Languages(tokenizers, model, task, {})
