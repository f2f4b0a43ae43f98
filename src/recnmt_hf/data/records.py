"""Records of a sentence: text with dependency tree or links before the tokenizer, token ids after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..errors import UserError, short_repr


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """
    A sentence with its dependency tree. Its text, `str(sentence)`, is the words separated by spaces; models without
    trees read it alone.

    Args:
        words (`list[str]` or `tuple[str]`): The words.
        heads (`list[int]` or `tuple[int]`): For each word the number of its head, from 1; 0 for roots, one or several.
        relations (`list[str]` or `tuple[str]`): For each word its relation to the head.

    Raises:
        UserError: A word is blank, the lists differ in length, a head is beyond the sentence, or there is a cycle.
    """

    words: Sequence[str]
    heads: Sequence[int]
    relations: Sequence[str]

    def __post_init__(self) -> None:
        lists = self.words, self.heads, self.relations
        if not all(isinstance(one, (list, tuple)) for one in lists) or len(set(map(len, lists))) > 1:
            raise UserError(f"words, heads and relations must be lists of the same length, not {short_repr(lists)}.")
        count = len(self.words)
        for number, (word, head, relation) in enumerate(zip(*lists, strict=True), start=1):
            is_text = isinstance(word, str) and word.strip() and isinstance(relation, str)
            if not (is_text and isinstance(head, int) and 0 <= head <= count):
                values = ", ".join(map(short_repr, (word, relation, head)))
                raise UserError(f"word {number} ({values}) is not a text, a relation and a head from 0 to {count}.")
        ancestors = [0, *self.heads]
        for _ in range(count.bit_length()):  # twice as far up each time
            ancestors = [ancestors[ancestor] for ancestor in ancestors]
        if number := next((number for number, ancestor in enumerate(ancestors) if ancestor), 0):
            raise UserError(f"the heads of word {number} ({short_repr(self.words[number - 1])}) form a cycle.")
        for name in ("words", "heads", "relations"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __str__(self) -> str:
        return " ".join(self.words)

    def with_text(self, text: str) -> ParsedSentence | None:
        """Return the tree over the words of another text, or `None` if it has another number of words."""
        pieces, sizes = text.split(), [len(word.split()) for word in self.words]  # a word may contain spaces
        if len(pieces) != sum(sizes):
            return None
        rest = iter(pieces)
        return ParsedSentence([" ".join(islice(rest, size)) for size in sizes], self.heads, self.relations)

    def part(self, start: int, end: int) -> ParsedSentence:
        """Return the words from `start` to before `end`. A word whose head is outside becomes a root."""
        heads = [head - start if start < head <= end else 0 for head in self.heads[start:end]]
        return ParsedSentence(self.words[start:end], heads, self.relations[start:end])


# A source as users pass it.
SourceText = str | ParsedSentence


@dataclass(frozen=True, slots=True)
class Links:
    """Links of a pair: a `line` of a file, its `place` for messages, and the `units` that positions count."""

    line: str
    place: str
    units: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence before the tokenizer: its text, the tree of a source, and the links of a pair with its target."""

    text: str
    tree: ParsedSentence | None = None
    links: Links | None = None

    @classmethod
    def of(cls, sentence: SourceText | Sentence) -> Sentence:
        """Return the record of a text or of a parsed sentence."""
        if isinstance(sentence, Sentence):
            return sentence
        return cls(str(sentence), sentence if isinstance(sentence, ParsedSentence) else None)

    def __str__(self) -> str:
        return self.text

    @property
    def public(self) -> SourceText:
        """The sentence as users see it."""
        return self.text if self.tree is None else self.tree

    def parts(self, texts: Sequence[str]) -> list[Sentence]:
        """Return consecutive parts of the text with their trees; a part from a cut within a word on has none."""
        if (tree := self.tree) is None:
            return [Sentence(text) for text in texts]
        parts, start = list[Sentence](), 0
        for text in texts:
            end, pieces = start, text.split()
            while end < len(tree.words) and sum(len(word.split()) for word in tree.words[start:end]) < len(pieces):
                end += 1
            matches = " ".join(tree.words[start:end]).split() == pieces
            parts.append(Sentence.of(tree.part(start, end)) if matches else Sentence(text))
            start = end if matches else len(tree.words)
        return parts


@dataclass(frozen=True, slots=True)
class TokenTree:
    """For each token of a source the position of its head (-1: none), and the id of the relation."""

    heads: list[int]
    relations: list[int]

    def select(self, positions: Sequence[int]) -> TokenTree:
        """Return the edges between the tokens at some positions."""
        new = {old: position for position, old in enumerate(positions)}
        heads = [new.get(self.heads[old], -1) for old in positions]
        pairs = zip(positions, heads, strict=True)
        return TokenTree(heads, [self.relations[old] if head >= 0 else 0 for old, head in pairs])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a sentence, without padding."""

    ids: list[int] = field(default_factory=list)
    tree: TokenTree | None = None  # of a source for a model that reads trees
    start: int | None = None  # first input of the decoder for a translation, if it is not the model's own
    # Number of first tokens of a translation that the model is given rather than predicts, such as the token of the
    # target language. They are part of its length, and their log-probability is 0, as in `generate`.
    given: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def truncated(self, limit: int, controls: Collection[int | None]) -> Tokens:
        """Return at most `limit` tokens of a sentence, with the control tokens at its end."""
        if len(self.ids) <= limit:
            return self
        end = len(self.ids)
        while end > len(self.ids) - limit and self.ids[end - 1] in controls:
            end -= 1
        kept = [*range(limit - (len(self.ids) - end)), *range(end, len(self.ids))]
        return Tokens([self.ids[position] for position in kept], self.tree and self.tree.select(kept))


# Tokens of several sentences.
TokenRows = Sequence[Tokens]
