"""Corpora: sources of sentence pairs, as recipes name them."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from datasets import load_dataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, explained, shorten
from ..models.user_errors import masked, remember_secrets
from ..options import Range, check_options, documented, option, options_of, parse
from .alignments import ALIGNMENT_UNITS, attach_links
from .files import digest_of_file
from .generated import generate_corpus, generate_split
from .languages import check_codes, key_of_language, known_code, language_ids, main_language
from .records import Sentence
from .text import SentencePair, is_url, read_aligned, read_jsonl, read_lines, read_tsv, skip_blank_pairs
from .tree_inputs import attach_trees, sentence_of_columns


whole_corpus = lru_cache(maxsize=1)(generate_corpus)  # made once for the splits and passes of a run
KINDS = ("source", "tsv", "jsonl", "dataset", "generated", "sacrebleu")
# Fields that only corpora of certain kinds have.
NEEDED = {"data_files": ["dataset"], "pair": ["sacrebleu"], "alignments": ["source"], "source_trees": ["source"]}
NEEDED |= {"tree_columns": ["dataset", "jsonl"], "source": ["target"], "target": ["source"]}
SPLITS = ("train", "validation", "test", "test_deep")


@documented
@dataclass(frozen=True)
class Corpus:
    """
    A source of sentence pairs: exactly one of `source` with `target`, `tsv`, `jsonl`, `dataset`, `generated`,
    `sacrebleu`. For summarization the target is the summary.
    """

    source: str | None = option(None, "source side of line-aligned text files (plain, gzip or Zstandard)")
    target: str | list[str] | None = option(None, "target side; in a test set also a list of files with references")
    tsv: str | None = option(None, "a file of tab-separated pairs")
    jsonl: str | None = option(None, "a file of JSON lines")
    dataset: str | None = option(None, "a set for `datasets.load_dataset`: a name on the Hub, or a local folder")
    data_files: str | list[str] | None = option(None, "files or URLs of a dataset `parquet`, `json` or `csv`")
    config: str | None = option(None, 'configuration of the dataset, e.g. "de-en"')
    split: str = option("train", 'split of the dataset; slices as in "train[:1000]" are allowed')
    revision: str | None = option(None, "revision of the dataset on the Hub")
    source_column: str | None = option(None, "column or JSON key of sources, if there is no `translation` feature")
    target_column: str | None = option(None, "column or JSON key of targets")
    generated: str | None = option(None, "split of the English-German grammar", choices=(None, *SPLITS))
    size: Annotated[int | None, Range(least=1, most=10**7)] = option(None, "sentences of the generated split")
    seed: int = option(1, "seed of the generated corpus")
    sacrebleu: str | None = option(None, "name of a test set of sacrebleu, such as wmt14")
    pair: str | None = option(None, "language pair of the test set, such as en-de; null: source_lang-target_lang")
    source_lang: str | None = option(None, "language code of the source; null: data.source_lang")
    target_lang: str | None = option(None, "language code of the target; null: data.target_lang")
    source_tag: str | None = option(None, "tag before each source, such as >>de<<; a symbol of the tokenizer")
    target_tag: str | None = option(None, "tag before each training target, which translations of test sets begin with")
    alignments: str | None = option(None, "file of word alignments, as `recnmt align` writes them; a line may be empty")
    alignment_units: str = option("words", "what links count: words, or non-control tokens", choices=ALIGNMENT_UNITS)
    source_trees: str | None = option(None, "CoNLL-U file with the trees of `source`; spaces separate words")
    tree_columns: bool = option(False, "read sources from the columns source_tokens, source_heads and source_relations")

    # Values of fields with secrets. As no field, `replace` passes it on, and `repr` and `asdict` do not show it.
    secrets: InitVar[Mapping[str, Any] | None] = None

    def __post_init__(self, secrets: Mapping[str, Any] | None) -> None:
        kept: dict[str, Any] = {}
        for name in options_of(Corpus):
            value = plain_paths(getattr(self, name))
            public, earlier = plain_paths(value, masked), (secrets or {}).get(name)
            if public != value:
                remember_secrets(str(value))
                kept[name] = value
            elif plain_paths(earlier, masked) == value != earlier:
                kept[name] = earlier
            object.__setattr__(self, name, public)
        object.__setattr__(self, "secrets", kept)
        check_options(self)
        check_codes(self)
        given = {name for name in options_of(Corpus) if getattr(self, name) not in (None, False, [])}
        for name, needed in NEEDED.items():
            if name in given and not given.intersection(needed):
                raise UserError(f"{name} needs {' or '.join(needed)}.", field=name)
        if self.alignments or self.has_trees:
            for name in sorted(given & {"source_tag", "target_tag"}):
                raise UserError(f"{name} cannot be combined with positions of words (links, trees).", field=name)
        kinds = [name for name in KINDS if getattr(self, name)]
        if len(kinds) != 1:
            raise UserError(f"A corpus needs exactly one of {', '.join(KINDS)}, got {', '.join(kinds) or 'none'}.")

    def with_secret(self, name: str) -> Any:
        """Return the value of a field to open it: URLs with their secrets."""
        return vars(self)["secrets"].get(name, getattr(self, name))

    @property
    def has_trees(self) -> bool:
        """Whether the sources have dependency trees."""
        return self.source_trees is not None or self.tree_columns

    def languages(self, source_lang: str, target_lang: str) -> tuple[str, str]:
        """Return the codes of source and target, by default those given."""
        return self.source_lang or source_lang, self.target_lang or target_lang

    def language_columns(
        self, source_lang: str, target_lang: str, tokenizers: Iterable[PreTrainedTokenizerBase]
    ) -> dict[str, str | None]:
        """Return the codes for tokenizers that name languages by tokens; `UserError` for an unknown one."""
        columns: dict[str, str | None] = {"source_lang": None, "target_lang": None}
        for name, code, tokenizer in zip(columns, self.languages(source_lang, target_lang), tokenizers, strict=True):
            if known := language_ids(tokenizer):
                columns[name] = known_code(code, known, name)
        return columns if any(columns.values()) else {}

    def test_set_files(self, source_lang: str, target_lang: str) -> list[str]:
        """Return the files of a test set of sacrebleu, which may download it: the source, then the references."""
        from sacrebleu.dataset import DATASETS

        codes = self.languages(source_lang, target_lang)
        pair = self.pair or "-".join(codes)
        claim = f"sacrebleu={self.sacrebleu} has no pair {pair}, or cannot be downloaded"
        with explained(claim, "sacrebleu", (Exception, SystemExit)):  # sacrebleu ends the process after some failures
            dataset = DATASETS[str(self.sacrebleu)]
            if not self.pair and pair not in dataset.langpairs:
                pair = "-".join(map(main_language, codes))
            return [dataset.get_source_file(pair), *dataset.get_reference_files(pair)]

    def pairs(self, source_lang: str, target_lang: str, on_empty: str = "error") -> Iterator[SentencePair]:
        """Yield the checked sentence pairs, with tags; see [`~recnmt_hf.data.text.read_aligned`] for the errors."""
        for source, target in self.rows(source_lang, target_lang, on_empty):
            yield SentencePair(source.public, target.text)

    def rows(
        self,
        source_lang: str,
        target_lang: str,
        on_empty: str = "error",
        *,
        tags: bool = True,
        references: bool = False,
        streaming: bool = False,
    ) -> Iterator[tuple[Sentence, ...]]:
        """Yield each source with its target, both with their `tags`, or with all `references`, which have none."""
        self.check_languages(source_lang, target_lang)
        for row in self._read(self.languages(source_lang, target_lang), on_empty, references, streaming):
            sentences = tuple(map(Sentence.of, row))
            yield self.tagged(sentences, references) if tags else sentences

    def tagged(self, row: tuple[Sentence, ...], references: bool = False) -> tuple[Sentence, ...]:
        """Return a source with its tag, and its target with its own; references have none."""
        tags = self.source_tag, None if references else self.target_tag
        if tags == (None, None):
            return row
        return tuple(text if tag is None else Sentence(f"{tag} {text}") for text, tag in zip_longest(row, tags))

    def _read(
        self, languages: tuple[str, str], on_empty: str, references: bool, streaming: bool
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows as the files have them: texts, parsed sentences, or sentences with links."""
        columns = self.source_column or languages[0], self.target_column or languages[1]
        if self.generated:
            if self.size is None:
                pairs = whole_corpus(seed=self.seed)[self.generated]
            else:
                pairs = generate_split(self.generated, self.size, self.seed)
            source, target = map(main_language, languages)
            return ((getattr(pair, source), getattr(pair, target)) for pair in pairs)
        if self.sacrebleu:
            files = self.test_set_files(*languages)
            return read_aligned(files if references else files[:2], on_empty)
        if self.source:
            if not references:
                self.check_single_target()
            lines: list[Iterator[Any]] = [
                read_lines(path) for name in ("source", "target") for path in as_list(self.with_secret(name))
            ]
            paths = [self.source, *as_list(self.target)]
            if self.source_trees is not None:
                lines[0] = attach_trees(lines[0], paths[0], self.with_secret("source_trees"))
            if self.alignments is not None:
                links = self.with_secret("alignments")
                lines[1] = attach_links(lines[1], paths[1], links, self.alignment_units)
            return read_aligned(paths, on_empty, lines)
        if self.tsv:
            place, rows = self.tsv, read_tsv(self.with_secret("tsv"))
        elif self.jsonl:
            read_source = sentence_of_columns if self.tree_columns else None
            place, rows = self.jsonl, read_jsonl(self.with_secret("jsonl"), *columns, read_source)
        else:
            place = ", ".join(part for part in (self.dataset, self.config, self.split) if part)
            rows = self._read_dataset(place, columns, streaming)
        return skip_blank_pairs(rows, [place] * 2, on_empty, "row" if self.dataset else "line")

    def _read_dataset(self, name: str, columns: tuple[str, str], streaming: bool) -> Iterator[tuple[int, SentencePair]]:
        """Yield row numbers and pairs of a set of `datasets`; a missing text is empty. `name` is for messages."""
        place = name
        try:
            rows = load_dataset(
                self.dataset,
                self.config,
                split=self.split,
                revision=self.revision,
                data_files=self.with_secret("data_files"),
                streaming=streaming and "[" not in self.split,
                # A copy of local files is found by their times, which do not change with every content.
                download_mode="reuse_cache_if_exists" if self.dataset_files() else None,
            )
            for number, row in enumerate(rows):
                record = row["translation"] if self.source_column is None and "translation" in row else row
                record = record or dict.fromkeys(columns)
                place = f"{name}, row {number} with the columns {', '.join(sorted(map(str, record)))}"
                texts: list[Any] = [sentence_of_columns(row, place)] if self.tree_columns else []
                texts += [(record[key_of_language(key, tuple(record))] or "").strip() for key in columns[len(texts) :]]
                yield number, SentencePair(*texts)
        except Exception as error:  # of many kinds
            # The text of a cause may have the secrets.
            cause = error if self.with_secret("data_files") == self.data_files else None
            reason = f"{type(error).__name__}: {shorten(str(error))}"
            raise UserError(f"The dataset {place} cannot be read ({reason}).", field=name) from cause

    def check_single_target(self, place: str = "") -> None:
        """Raise `UserError` if the corpus has several references. `place` is its name in the recipe."""
        if isinstance(self.target, list):
            field = f"{place}.target".lstrip(".")
            raise UserError(f"{field} is a list of files. Only a test set can have several references.", field=field)

    def check_languages(self, source_lang: str, target_lang: str) -> None:
        """Raise `UserError` if the corpus cannot have these languages; nothing is read."""
        source_lang, target_lang = self.languages(source_lang, target_lang)
        is_known = not self.generated or {main_language(source_lang), main_language(target_lang)} == {"en", "de"}
        has_columns = (self.source_column is not None or self.tree_columns) and self.target_column is not None
        is_same = (self.jsonl or self.dataset) and source_lang == target_lang and not has_columns
        if is_same or not is_known:
            place = self.jsonl or self.dataset or "The generated English-German corpus"
            reason = f"lacks columns for source_lang={source_lang} and target_lang={target_lang}"
            raise UserError(f"{place} {reason}. Set source_column and target_column.", field=self.jsonl or self.dataset)

    def check_files(self, source_lang: str, target_lang: str) -> None:
        """Raise an error for a missing or unreadable file, or a test set that cannot be downloaded."""
        if self.sacrebleu:
            self.test_set_files(source_lang, target_lang)
        for path in self.local_files():
            next(read_lines(path), None)

    def local_files(self) -> list[str]:
        """Return the local files that the corpus names."""
        files = [self.source, *as_list(self.target), self.tsv, self.jsonl, self.alignments, self.source_trees]
        return [path for path in files if path and not is_url(path)]

    def dataset_files(self) -> list[str]:
        """Return the local files of a set of `datasets`."""
        files: list[str] = []
        for path in as_list(self.data_files or []):
            files += [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))
        if self.dataset and Path(self.dataset).is_dir():
            files += [str(path) for path in sorted(Path(self.dataset).rglob("*")) if path.is_file()]
        return files

    def fingerprint(self) -> list[Any]:
        """Return [`identity`] and checksums of local files, which identify the content."""
        files = [path for path in self.local_files() + self.dataset_files() if Path(path).is_file()]
        return [self.identity(), list(map(digest_of_file, files))]

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide which pairs are read."""
        # Fields of later releases are left out where they are not used: the content is the same as before.
        later = set() if self.alignments else {"alignments", "alignment_units"}
        later |= set() if self.has_trees else {"source_trees", "tree_columns"}
        tags_and_codes = ("source_tag", "target_tag", "source_lang", "target_lang")
        later |= {name for name in ("data_files", "sacrebleu", "pair", *tags_and_codes) if not getattr(self, name)}
        own = {name: getattr(self, name) for name in options_of(Corpus) if name not in later}
        return own | {"lcsts": None, "min_score": None}  # fields of earlier releases


def as_list(value: Any) -> list[Any]:
    """Return a list of one value or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def plain_paths(value: Any, of_url: Callable[[str], str] = str) -> Any:
    """Return a path as text and a URL as `of_url` returns it, also in a list; any other value as it is."""
    if isinstance(value, (list, tuple)):
        return [plain_paths(each, of_url) for each in value]
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return of_url(value) if isinstance(value, str) and is_url(value) else value


# As public functions take them.
Corpora = Corpus | Mapping[str, Any] | Sequence[Corpus | Mapping[str, Any]]


def parse_corpora(corpora: Corpora, place: str = "corpora") -> list[Corpus]:
    """Return a list of [`Corpus`] from one or several objects or mappings; `place` is their name in messages."""
    is_list = isinstance(corpora, (list, tuple))
    items: Sequence[Any] = corpora if is_list else [corpora]  # type: ignore[assignment]
    if not items:
        raise UserError(f"{place} is an empty list.", field=place)
    return [
        corpus if isinstance(corpus, Corpus) else parse(Corpus, corpus, f"{place}[{number}]" if is_list else place)
        for number, corpus in enumerate(items)
    ]


def load_pairs(corpora: Corpora, source_lang: str, target_lang: str, on_empty: str = "error") -> Iterator[SentencePair]:
    """
    Yield the pairs of `corpora`, one or several in sequence, written as in a recipe, from the language `source_lang` to
    `target_lang`. `on_empty` (`"error"` or `"skip"`) is the treatment of pairs with an empty side. `ValueError` or
    `FileNotFoundError`, which name file and line, if a corpus cannot be read.
    """
    for corpus in parse_corpora(corpora):
        yield from corpus.pairs(source_lang, target_lang, on_empty)


def load_test_set(
    corpora: Corpora, source_lang: str, target_lang: str, on_empty: str = "error"
) -> tuple[list[Any], list[list[str]]]:
    """Return the sources of a test set, and its sets of references; errors are those of [`load_pairs`]."""
    rows = [
        (source.public, *map(str, references))
        for corpus in parse_corpora(corpora)
        for source, *references in corpus.rows(source_lang, target_lang, on_empty, references=True)
    ]
    sources, *sets = (list(column) for column in zip(*rows, strict=True))
    return sources, sets
