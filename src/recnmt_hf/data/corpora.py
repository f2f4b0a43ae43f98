"""Named corpora, and tokenized datasets made from them and cached on disk."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .._languages import check_codes, key_of_language, main_language
from .._plain_text import control_ids, encode_plain, ids_of_texts
from .._values import Range, check_options, check_value, documented, kind_of, option, parse
from ..errors import ExistingFileError, MissingFileError, UserError, short_repr
from .alignments import ALIGNMENT_UNITS, attach_links, links_of_batch
from .files import digest_of_file, partial_folder
from .generated import generate_corpus, generate_split
from .languages import in_languages, known_code, language_ids
from .named_test_sets import files_of_test_set
from .records import ParsedSentence, Sentence, Tokens
from .text import (
    ON_EMPTY,
    ON_LONG,
    SentencePair,
    hide_secrets,
    is_url,
    original_url,
    read_aligned,
    read_jsonl,
    read_lines,
    read_tsv,
    skip_blank_pairs,
)
from .tree_inputs import TreeEncoder, tree_columns
from .trees import COLUMNS, attach_trees, columns_of_tree, sentence_of_columns, sentences_of_columns


logger = logging.get_logger(__name__)

# Version of the preparation; part of the name of prepared data.
PREPARATION = 2
# Share of unknown tokens above which a warning is logged.
UNKNOWN_SHARE = 0.01
# Limit of a generated corpus; a larger number is probably a typo.
MAX_SENTENCES = 10**7
# Made once in its default sizes for the splits and passes of a run.
whole_corpus = lru_cache(maxsize=1)(generate_corpus)
# Fields that only corpora of certain kinds have.
NEEDED = {"data_files": ["dataset"], "pair": ["sacrebleu"], "alignments": ["source"]}
NEEDED |= {"source_trees": ["source"], "tree_columns": ["dataset", "jsonl"]}
GENERATED_SPLITS = ("train", "validation", "test", "test_deep")


@documented
@dataclass(frozen=True)
class Corpus:
    """
    A source of sentence pairs: exactly one of `source` with `target`, `tsv`, `jsonl`, `dataset`, `generated`,
    `sacrebleu`. For summarization the target is the summary.
    """

    source: str | None = option(None, "source side of line-aligned text files (plain, gzip or Zstandard)")
    target: str | list[str] | None = option(  # noqa: RUF009
        None, "target side of line-aligned text files; in a test set, also a list of files with references"
    )
    tsv: str | None = option(None, "a file of tab-separated pairs")
    jsonl: str | None = option(None, "a file of JSON lines")
    dataset: str | None = option(
        None, "a set of pairs for `datasets.load_dataset`: a name on the Hub, or a local folder"
    )
    data_files: str | list[str] | None = option(  # noqa: RUF009
        None, "files or URLs of the dataset, which may then be `parquet`, `json` or `csv`"
    )
    config: str | None = option(None, 'configuration of the dataset, e.g. "de-en"')
    split: str = option("train", 'split of the dataset; slices as in "train[:1000]" are allowed')
    revision: str | None = option(None, "revision of the dataset on the Hub")
    source_column: str | None = option(
        None, "column (or JSON key) of source sentences, if there is no `translation` feature"
    )
    target_column: str | None = option(None, "column (or JSON key) of target sentences")
    generated: str | None = option(
        None, "a split of the generated English-German corpus", choices=(None, *GENERATED_SPLITS)
    )
    size: Annotated[int | None, Range(least=1, most=MAX_SENTENCES)] = option(
        None, "number of sentences of the generated split"
    )
    seed: int = option(1, "seed of the generated corpus")
    sacrebleu: str | None = option(None, "name of a test set of sacrebleu, such as wmt14")
    pair: str | None = option(None, "language pair of the test set, such as en-de; null: source_lang-target_lang")
    source_lang: str | None = option(None, "language code of the source; null: that of data")
    target_lang: str | None = option(None, "language code of the target; null: that of data")
    source_tag: str | None = option(
        None, "tag before each source, such as >>de<<; one of tokenizer.tags, or a symbol of a given tokenizer"
    )
    target_tag: str | None = option(
        None, "tag before each training target; translations of a test set are forced to begin with it"
    )
    alignments: str | None = option(
        None,
        "file of word alignments of line-aligned text files, in the format of `recnmt align` (links such as 0-0 1-2), "
        "for guided_alignment; a line may be empty",
    )
    alignment_units: str = option(
        "words",
        "units that the positions in alignments count; tokens: tokens of the tokenizer, without control tokens",
        choices=ALIGNMENT_UNITS,
    )
    source_trees: str | None = option(
        None, "CoNLL-U file with the dependency trees of `source`, plain or compressed; words are separated by spaces"
    )
    tree_columns: bool = option(
        False,
        "read the source and its dependency tree from the columns source_tokens, source_heads and source_relations of "
        "a dataset or JSON lines",
    )

    def __post_init__(self) -> None:
        def plain(value: Any) -> Any:
            return hide_secrets(os.fspath(value) if isinstance(value, os.PathLike) else value)

        for name, value in vars(self).copy().items():
            parts = [plain(part) for part in value] if isinstance(value, (list, tuple)) else plain(value)
            object.__setattr__(self, name, parts)
        check_options(self)
        check_codes(self)
        names = ("source", "tsv", "jsonl", "dataset", "generated", "sacrebleu")
        kinds = [name for name in names if getattr(self, name)]
        if len(kinds) != 1:
            raise UserError(
                "A corpus needs exactly one of source, tsv, jsonl, dataset, generated and sacrebleu, got "
                f"{', '.join(kinds) or 'none'}. Write several corpora as a list."
            )
        if (self.source is None) != (self.target in (None, [])):
            raise UserError(
                f"{'source' if self.target else 'target'} is missing. Text files need both source and target.",
                field="source" if self.target else "target",
            )
        for name, needed in NEEDED.items():
            if (value := getattr(self, name)) not in (None, False) and not any(getattr(self, kind) for kind in needed):
                raise UserError(
                    f"{name}={short_repr(value)} is only allowed with {' or '.join(needed)}. Set that, or remove "
                    f"{name}.",
                    field=name,
                )
        for name in ("source_tag", "target_tag") if self.alignments or self.has_trees else ():
            if (value := getattr(self, name)) is not None:
                other = "alignments" if self.alignments else "dependency trees"
                raise UserError(
                    f"{name}={short_repr(value)} cannot be combined with {other}, whose positions count words.",
                    field=name,
                )

    @property
    def has_trees(self) -> bool:
        """Whether the source sentences have dependency trees."""
        return self.source_trees is not None or self.tree_columns

    def languages(self, source_lang: str, target_lang: str) -> tuple[str, str]:
        """Return the codes of source and target, by default those given."""
        return self.source_lang or source_lang, self.target_lang or target_lang

    def language_columns(
        self, source_lang: str, target_lang: str, tokenizers: Iterable[PreTrainedTokenizerBase]
    ) -> dict[str, str | None]:
        """
        Return the columns `source_lang` and `target_lang` of the pairs for tokenizers that name languages by tokens
        (`None` for the side of another one), and none for other tokenizers. `UserError` for an unknown code.
        """
        codes = zip(("source_lang", "target_lang"), self.languages(source_lang, target_lang), tokenizers, strict=True)
        columns = {
            name: known_code(code, known, name) if (known := language_ids(tokenizer)) else None
            for name, code, tokenizer in codes
        }
        return columns if any(columns.values()) else {}

    def test_set_files(self, source_lang: str, target_lang: str, download: bool = True) -> list[str]:
        """Return the files of a test set of sacrebleu ([`~recnmt_hf.data.named_test_sets.files_of_test_set`])."""
        codes = self.languages(source_lang, target_lang)
        pairs = [self.pair] if self.pair else ["-".join(codes), "-".join(map(main_language, codes))]
        return files_of_test_set(str(self.sacrebleu), pairs, download)

    def pairs(self, source_lang: str, target_lang: str, on_empty: str = "error") -> Iterator[SentencePair]:
        """Yield the checked sentence pairs, with tags; see [`~recnmt_hf.data.text.read_parallel`] for the errors."""
        rows = self.sentences(source_lang, target_lang, on_empty)
        return (SentencePair(source.public, target.text) for source, target in rows)

    def sentences(
        self, source_lang: str, target_lang: str, on_empty: str = "error", tags: bool = True, streaming: bool = False
    ) -> Iterator[tuple[Sentence, Sentence]]:
        """Yield the [`pairs`] with their links. `streaming` reads a set of `datasets` without copying it."""
        source_tag, target_tag = (self.source_tag, self.target_tag) if tags else (None, None)
        rows = self._pairs(source_lang, target_lang, on_empty, streaming)
        return ((tagged(source_tag, source), tagged(target_tag, target)) for source, target in rows)

    def _pairs(
        self, source_lang: str, target_lang: str, on_empty: str, streaming: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the pairs as the files have them."""
        self.check_languages(source_lang, target_lang)
        languages = self.languages(source_lang, target_lang)
        columns = self.source_column or languages[0], self.target_column or languages[1]
        if self.generated:
            if self.size is None:
                pairs = whole_corpus(seed=self.seed)[self.generated]
            else:
                pairs = generate_split(self.generated, self.size, self.seed)
            source, target = map(main_language, languages)
            return (SentencePair(getattr(pair, source), getattr(pair, target)) for pair in pairs)
        if self.dataset:
            place = ", ".join(part for part in (self.dataset, self.config, self.split) if part)
            rows = self._rows(place, columns, streaming)
        elif self.tsv:
            place, rows = self.tsv, read_tsv(self.tsv)
        elif self.jsonl:
            read_source = sentence_of_columns if self.tree_columns else None
            place, rows = self.jsonl, read_jsonl(self.jsonl, *columns, read_source)
        elif self.sacrebleu:
            files = self.test_set_files(source_lang, target_lang)
            return read_aligned(files[:2], on_empty)
        else:
            self.check_single_target()
            assert self.source is not None and isinstance(self.target, str)
            return self._aligned([self.source, self.target], on_empty)
        return skip_blank_pairs(rows, [place] * 2, on_empty, "row" if self.dataset else "line")

    def test_rows(self, source_lang: str, target_lang: str, on_empty: str = "error") -> Iterator[tuple[Any, ...]]:
        """Yield each source, with its tag, and its references, which have none."""
        rows: Iterator[tuple[Any, ...]]
        if self.sacrebleu:
            rows = read_aligned(self.test_set_files(source_lang, target_lang), on_empty)
        elif isinstance(self.target, list):
            rows = self._aligned([str(self.source), *self.target], on_empty)
        else:
            rows = self._pairs(source_lang, target_lang, on_empty)
        return ((tagged(self.source_tag, row[0]).public, *map(str, row[1:])) for row in rows)

    def _aligned(self, paths: list[str], on_empty: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of line-aligned files, the source first, with its trees and the links of the pairs."""
        lines: list[Iterator[Any]] = [read_lines(path) for path in paths]
        if self.source_trees is not None:
            lines[0] = attach_trees(lines[0], paths[0], self.source_trees)
        if self.alignments is not None:
            lines[1] = attach_links(lines[1], paths[1], self.alignments, self.alignment_units)
        return read_aligned(paths, on_empty, lines)

    def check_single_target(self, place: str = "") -> None:
        """Raise `UserError` if the corpus has several references. `place` is its name in the recipe."""
        if isinstance(self.target, list):
            raise UserError(
                f"{f'{place}.target'.lstrip('.')} lists {short_repr(self.target)}. Only a test set can have several "
                "references.",
                field=f"{place}.target".lstrip("."),
            )

    def check_languages(self, source_lang: str, target_lang: str) -> None:
        """Raise `UserError` if the corpus cannot have these languages; nothing is read."""
        source_lang, target_lang = self.languages(source_lang, target_lang)
        if self.sacrebleu:
            self.test_set_files(source_lang, target_lang, download=False)
        if self.generated and {main_language(source_lang), main_language(target_lang)} != {"en", "de"}:
            raise UserError(
                f"The generated corpus is English-German, not {source_lang}-{target_lang}. Set source_lang: en and "
                "target_lang: de, or use another corpus."
            )
        has_columns = (self.source_column is not None or self.tree_columns) and self.target_column is not None
        if (self.jsonl or self.dataset) and source_lang == target_lang and not has_columns:
            raise UserError(
                f"Source and target of {self.jsonl or self.dataset} are the same column, since source_lang and "
                f"target_lang are both {source_lang}. Set source_column and target_column.",
                field=self.jsonl or self.dataset,
            )

    def local_files(self) -> list[str]:
        """Return the local files that the corpus names."""
        targets = self.target if isinstance(self.target, list) else [self.target]
        files = [self.source, *targets, self.tsv, self.jsonl, self.alignments, self.source_trees]
        return [path for path in files if path and not is_url(path)]

    def _rows(self, name: str, columns: tuple[str, str], streaming: bool = False) -> Iterator[tuple[int, SentencePair]]:
        """Yield row numbers and pairs of a set of `datasets`; a missing text is empty. `name` is for messages."""
        for number, row in enumerate(self._records(name, streaming)):
            record = row["translation"] if self.source_column is None and "translation" in row else row
            texts: list[Any] = [sentence_of_columns(row, f"{name}, row {number}")] if self.tree_columns else []
            for column in columns[len(texts) :]:
                column = key_of_language(column, tuple(record or ()))
                if record and column not in record:
                    known = ", ".join(sorted(map(str, record)))
                    raise UserError(f"The dataset {name} has no column {short_repr(column)}, only {known}.", field=name)
                text = (record or {}).get(column) or ""
                if not isinstance(text, str):
                    raise UserError(
                        f"The dataset {name}, row {number}: column {column!r} must contain text, got "
                        f"{short_repr(text)}. Set source_column and target_column to columns of sentences.",
                        field=name,
                    )
                texts.append(text.strip())
            yield number, SentencePair(*texts)

    def _records(self, name: str, streaming: bool) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of a set of `datasets`; `UserError` if one cannot be read."""
        try:
            yield from load_dataset(
                self.dataset,
                self.config,
                split=self.split,
                revision=self.revision,
                data_files=original_url(self.data_files),
                streaming=streaming and "[" not in self.split,
                # A copy of local files is found by their times, which do not change with every content.
                download_mode="reuse_cache_if_exists" if self.dataset_files() else None,
            )
        except Exception as error:  # of many kinds
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            hides = self.data_files != original_url(self.data_files)  # the text of a cause may have the secrets
            raise UserError(f"The dataset {name} cannot be loaded: {reason}.", field=name) from (
                None if hides else error
            )

    def check_files(self, source_lang: str, target_lang: str) -> None:
        """Raise `UserError` for a missing, unreadable or empty file, or a test set that cannot be downloaded."""
        if self.sacrebleu:
            self.test_set_files(source_lang, target_lang)
        for path in self.local_files():
            if next(read_lines(path), None) is None:
                raise UserError(f"{path} is empty.", field=path)
        if self.dataset and self.dataset.startswith(("/", "./", "../", "~")) and not Path(self.dataset).exists():
            raise MissingFileError(f"The folder {self.dataset} does not exist.", field=self.dataset)

    def fingerprint(self) -> list[Any]:
        """Return [`identity`] and checksums of local files, which identify the content."""
        files = self.local_files() + self.dataset_files()
        return [self.identity(), [digest_of_file(path) for path in files if Path(path).is_file()]]

    def dataset_files(self) -> list[str]:
        """Return the local files of a set of `datasets`."""
        files: list[str] = []
        for path in [self.data_files] if isinstance(self.data_files, str) else self.data_files or []:
            files += [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))
        if self.dataset and Path(self.dataset).is_dir():
            files += [str(path) for path in sorted(Path(self.dataset).rglob("*")) if path.is_file()]
        return files

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide which pairs are read."""
        # Fields of later releases are left out where they are not used: the content is the same as before.
        later = set() if self.alignments else {"alignments", "alignment_units"}
        later |= set() if self.has_trees else {"source_trees", "tree_columns"}
        names = ("data_files", "sacrebleu", "pair")
        tags_and_codes = ("source_tag", "target_tag", "source_lang", "target_lang")
        later |= {name for name in (*names, *tags_and_codes) if not getattr(self, name)}
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in later}
        return own | {"lcsts": None, "min_score": None}  # fields of earlier releases


def tagged(tag: str | None, sentence: Any) -> Sentence:
    """Return a sentence with a tag before its text, if there is one."""
    return Sentence.of(sentence if tag is None else f"{tag} {sentence}")


# One corpus or several, as public functions take them.
Corpora = Corpus | Mapping[str, Any] | Sequence[Corpus | Mapping[str, Any]]


def parse_corpora(corpora: Corpora, place: str = "corpora") -> list[Corpus]:
    """Return a list of [`Corpus`] from one or several objects or mappings; `place` is their name in messages."""
    if isinstance(corpora, Corpus):
        return [corpora]
    if isinstance(corpora, Mapping):
        return [parse(Corpus, corpora, place)]
    if not isinstance(corpora, (list, tuple)) or not corpora:
        raise UserError(
            f"{place} must be a list of corpora, got {'an empty list' if corpora == [] else kind_of(corpora)}. Write "
            "e.g. [{source: a.en, target: a.de}] or [{generated: train}].",
            field=place,
        )
    return [
        corpus if isinstance(corpus, Corpus) else parse(Corpus, corpus, f"{place}[{number}]")
        for number, corpus in enumerate(corpora)
    ]


def load_pairs(corpora: Corpora, source_lang: str, target_lang: str, on_empty: str = "error") -> Iterator[SentencePair]:
    """
    Yield the pairs of one corpus, or of several in sequence.

    Args:
        corpora: A corpus or several, as in a recipe.
        source_lang, target_lang (`str`): Language codes.
        on_empty (`str`, *optional*, defaults to `"error"`): `"error"` or `"skip"`, for pairs with an empty side.

    Raises:
        ValueError, FileNotFoundError: A corpus cannot be read; the message names file and line.
    """
    for corpus in parse_corpora(corpora):
        yield from corpus.pairs(source_lang, target_lang, on_empty)


def load_test_set(
    corpora: Corpora, source_lang: str, target_lang: str, on_empty: str = "error"
) -> tuple[list[Any], list[list[str]]]:
    """
    Return the sources of a test set, and its sets of references, each as long as the sources. Errors are those of
    [`load_pairs`], and `UserError` if corpora have different numbers of references.
    """
    rows = [row for corpus in parse_corpora(corpora) for row in corpus.test_rows(source_lang, target_lang, on_empty)]
    if not rows:
        raise UserError(
            f"The corpus contains no sentence pairs. Check its files and on_empty={short_repr(on_empty)}.",
            field="on_empty",
        )
    counts = sorted({len(row) - 1 for row in rows})
    if len(counts) > 1:
        raise UserError(
            f"The corpora of a test set have different numbers of references ({', '.join(map(str, counts))}).",
            field="target",
        )
    sources, *references = (list(column) for column in zip(*rows, strict=True))
    return sources, references


def tokenize_pairs(
    batch: Mapping[str, list[Any]],
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    most: tuple[int, int] | None = None,
    trees: TreeEncoder | None = None,
) -> dict[str, list[Any]]:
    """
    Return token ids and lengths of a batch of `source` and `target` sentences, truncated to `most` tokens. Control
    tokens in the sentences, such as `</s>`, are text. Columns `source_lang` and `target_lang` have the languages of
    tokenizers that name them by tokens. With a column `alignment` links between the tokens are added. With `trees` the
    batch has columns of trees, and the inputs of models that read them are added.
    """
    if "source_lang" in batch:
        runs: dict[str, list[Any]] = {}
        start = 0
        for languages, run in groupby(zip(batch["source_lang"], batch["target_lang"], strict=True)):
            end = start + sum(1 for _ in run)
            part = {name: batch[name][start:end] for name in batch if name not in ("source_lang", "target_lang")}
            with in_languages(source_tokenizer, languages[0], None), in_languages(target_tokenizer, None, languages[1]):
                made = tokenize_pairs(part, source_tokenizer, target_tokenizer, most, trees)
            for name, values in made.items():
                runs.setdefault(name, []).extend(values)
            start = end
        return runs
    sources = list(map(Tokens, ids_of_texts(source_tokenizer, batch["source"])))
    targets = list(map(Tokens, ids_of_texts(target_tokenizer, batch["target"], is_target=True)))
    if trees is not None:
        sentences = sentences_of_columns(batch["source"], batch)
        parsed = {row: sentence for row, sentence in enumerate(sentences) if isinstance(sentence, ParsedSentence)}
        for row, tokens in zip(parsed, trees(list(parsed.values())), strict=True):
            sources[row] = tokens
    if most is not None:
        controls = control_ids(source_tokenizer), control_ids(target_tokenizer)
        sources = [tokens.truncated(most[0], controls[0]) for tokens in sources]
        targets = [tokens.truncated(most[1], controls[1]) for tokens in targets]
    columns: dict[str, list[Any]] = {
        "input_ids": [tokens.ids for tokens in sources],
        "labels": [tokens.ids for tokens in targets],
        "source_length": list(map(len, sources)),
        "target_length": list(map(len, targets)),
        **({} if trees is None else tree_columns(sources)),
    }
    if "alignment" in batch:
        ids = columns["input_ids"], columns["labels"]
        columns["links"] = links_of_batch(batch, (source_tokenizer, target_tokenizer), ids)
    return columns


def prepare_dataset(
    corpora: Corpora,
    source_lang: str,
    target_lang: str,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    cache_dir: str | Path,
    max_source_length: int = 256,
    max_target_length: int = 256,
    max_length_ratio: float | None = None,
    on_empty: str = "error",
    num_proc: int | None = None,
    keep_text: bool = False,
    on_long: str = "skip",
    trees: TreeEncoder | None = None,
) -> Dataset:
    """
    Prepare a tokenized dataset once, and load it from `cache_dir` afterwards.

    Args:
        corpora: One corpus or a list of them.
        source_lang, target_lang (`str`): Language codes.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): May be the same one.
        cache_dir (`str` or `Path`): Folder for prepared data, each under a name made from content and settings.
        max_source_length, max_target_length (`int`): Maximum numbers of tokens, end token included.
        max_length_ratio (`float`, *optional*): Pairs whose lengths differ by more than this factor are skipped.
        on_empty (`str`): Treatment of pairs with a blank side: `"error"` or `"skip"`.
        num_proc (`int`, *optional*): Processes that tokenize.
        keep_text (`bool`): Whether to keep the columns `source` and `target`, not truncated.
        on_long (`str`): Treatment of pairs with more tokens: `"skip"` or `"truncate"`.
        trees ([`~recnmt_hf.data.TreeEncoder`], *optional*): For a model that reads dependency trees.

    Returns:
        `datasets.Dataset` with `input_ids`, `labels`, `source_length`, `target_length` (and the text), `links` if a
        corpus has alignments (`[source, target, source, target, ...]`, positions of tokens), and with `trees` also
        `dependency_heads` and `dependency_relations`.

    Raises:
        ValueError: All pairs are skipped, a setting is not allowed, or a corpus cannot be read.
        FileExistsError: `cache_dir` is a file.
    """
    corpora = parse_corpora(corpora)
    tokenizers = (source_tokenizer, target_tokenizer)
    for corpus in corpora:
        corpus.language_columns(source_lang, target_lang, tokenizers)  # reject unknown codes
    check_value("max_source_length", max_source_length, int, Range(least=1))
    check_value("max_target_length", max_target_length, int, Range(least=1))
    check_value("max_length_ratio", max_length_ratio, float | None, Range(least=1))
    check_value("num_proc", num_proc, int | None, Range(least=1))
    check_value("on_empty", on_empty, Literal[ON_EMPTY])
    check_value("on_long", on_long, Literal[ON_LONG])
    settings = [
        PREPARATION,
        [corpus.fingerprint() for corpus in corpora],
        [source_lang, target_lang, max_source_length, max_target_length, max_length_ratio, on_empty, keep_text],
        [tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers],
        *([] if on_long == "skip" else [on_long]),
        *([] if trees is None else [trees.fingerprint()]),
    ]
    key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:24]
    folder = Path(cache_dir) / key
    if (prepared := load_prepared(folder)) is not None:
        return prepared
    if Path(cache_dir).is_file():
        raise ExistingFileError(f"{cache_dir} is a file, but the output is a folder.", field=cache_dir)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with partial_folder(Path(cache_dir)) as working:
        data = collect(corpora, source_lang, target_lang, on_empty, working, trees is not None, tokenizers)
        total = len(data)
        num_proc = max(1, min(num_proc or 1, total // 1000))
        try:
            data = data.map(
                tokenize_pairs,
                batched=True,
                fn_kwargs={
                    "source_tokenizer": source_tokenizer,
                    "target_tokenizer": target_tokenizer,
                    "most": (max_source_length, max_target_length) if on_long == "truncate" else None,
                    "trees": trees,
                },
                num_proc=num_proc if num_proc > 1 else None,
                remove_columns=[name for name in data.column_names if name == "alignment" or not keep_text],
                desc=f"Tokenizing {total} pairs",
                new_fingerprint=f"{key}-tokenized",
                cache_file_name=str(working / "tokenized.arrow"),
            )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise UserError(
                f"One of {short_repr(num_proc)} tokenization processes was killed. Reduce num_proc if memory is short.",
                field="num_proc",
            ) from error
        sides = (("source", "input_ids", source_tokenizer), ("target", "labels", target_tokenizer))
        for side, column, tokenizer in sides:
            if tokenizer.unk_token_id is not None:
                ids = pc.list_flatten(data.data.column(column))
                warn_about_unknown(count_equal(ids, tokenizer.unk_token_id), len(ids), side)
        source, target = (np.array(data[name][:]) for name in ("source_length", "target_length"))
        fits = (source <= max_source_length) & (target <= max_target_length)
        if max_length_ratio is not None:
            fits &= np.maximum(source, target) <= float(max_length_ratio) * np.minimum(source, target)
        indices = np.flatnonzero(fits).tolist()
        if not indices:
            raise UserError(
                f"All {total} sentence pairs exceed max_source_length={max_source_length}, "
                f"max_target_length={max_target_length} or max_length_ratio."
            )
        if len(indices) < total:
            data = data.select(indices)
        done = working / "done"
        data.save_to_disk(str(done))
        if folder.exists():  # damaged; processes that read it at this moment keep their open files
            os.replace(folder, working / "damaged")
        try:
            os.replace(done, folder)
        except OSError:  # another process finished the same work first
            if not folder.is_dir():
                raise
    return load_from_disk(str(folder))


def load_prepared(folder: Path) -> Dataset | None:
    """Return prepared data, or `None` if it is missing or damaged and has to be prepared again."""
    if not folder.is_dir():
        return None
    try:
        return load_from_disk(str(folder))
    except (OSError, ValueError):
        logger.warning(f"The prepared data in {folder} is damaged and will be prepared again.")
        return None


def warn_about_unknown(unknown: int, total: int, side: str | None = None) -> None:
    """Log a warning if more than a few tokens (of a side) are unknown."""
    if unknown > UNKNOWN_SHARE * total:
        of_side = f"{side} " if side else ""
        logger.warning(
            f"{100 * unknown / total:.1f}% of the {of_side}tokens are unknown to the {of_side}tokenizer. Use a larger "
            "vocabulary, or BPE with bytes for unknown characters."
        )


def count_equal(ids: pa.Array | pa.ChunkedArray, id: int) -> int:
    """Return how often a token id occurs."""
    return pc.sum(pc.equal(ids, id)).as_py() or 0


def collect(
    corpora: Sequence[Corpus],
    source_lang: str,
    target_lang: str,
    on_empty: str,
    working: Path,
    trees: bool = False,
    tokenizers: Sequence[PreTrainedTokenizerBase] = (),
) -> Dataset:
    """
    Write the checked sentence pairs to a dataset with the columns `source` and `target`, `alignment` if a corpus has
    links, with `trees` those of the sources' trees, which are null for a sentence without one, and `source_lang` and
    `target_lang` for `tokenizers` that name languages by tokens.
    """
    from datasets.arrow_writer import ArrowWriter

    path, text = str(working / "pairs.arrow"), pa.string()
    schema: dict[str, Any] = {"source": text, "target": text}
    if has_links := any(corpus.alignments for corpus in corpora):
        schema["alignment"] = pa.struct(dict.fromkeys(("line", "place", "units"), text))
    if trees:
        schema |= zip(COLUMNS, map(pa.list_, (text, pa.int32(), text)), strict=True)
    if any(map(language_ids, tokenizers)):
        schema |= {"source_lang": text, "target_lang": text}
    with ArrowWriter(path=path, schema=pa.schema(schema)) as writer:
        for corpus in corpora:
            languages = corpus.language_columns(source_lang, target_lang, tokenizers)
            for pair in corpus.sentences(source_lang, target_lang, on_empty):
                writer.write(row_of_pair(*pair, has_links, trees) | languages)
        count, _ = writer.finalize()
    if not count:
        raise UserError(
            f"The corpus contains no sentence pairs. Check its files and on_empty={short_repr(on_empty)}.",
            field="on_empty",
        )
    return Dataset.from_file(path)


def row_of_pair(source: Sentence, target: Sentence, has_links: bool, has_trees: bool) -> dict[str, Any]:
    """Return a pair as a row of a dataset, with its links and the tree of its source if there are columns for them."""
    row: dict[str, Any] = {"source": source.text, "target": target.text}
    if has_links:
        row["alignment"] = None if target.links is None else asdict(target.links)
    return row | columns_of_tree(source.tree) if has_trees else row


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a checksum that is the same for tokenizers that encode text in the same way."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def ids_of(text: str, is_target: bool) -> list[int]:
        return encode_plain(tokenizer, text, is_target)["input_ids"]

    language = min(language_ids(tokenizer), default=None)  # every text is encoded in its own
    with in_languages(tokenizer, language, language):
        if backend is None:
            # Settings have no common interface, so compare the encoding of a text, which depends on them.
            probe = "A b-c, 1.5 Ä 你好 </s>"
            ids = [ids_of(probe, side) for side in (False, True)]
            state: Any = [type(tokenizer).__name__, tokenizer.get_vocab(), ids]
        else:
            state = json.loads(backend.to_str())
            state.pop("padding", None)
            state.pop("truncation", None)
            if (controls := ids_of("", True)) != ids_of("", False):
                state["target_controls"] = controls
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
