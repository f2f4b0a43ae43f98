"""Source and target tokenizer of a model: load, save, stamp, and check them against the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .._loading_errors import optional_file
from .._plain_text import encode_plain
from ..errors import UserError
from .languages import in_languages, language_ids
from .tokenization import load_unchecked
from .tree_inputs import Relations, TreeEncoder, tree_options


TARGET_TOKENIZER = "target_tokenizer"  # subfolder for the tokenizer of a target with a separate vocabulary
# Embeddings may have more rows than the tokenizer has symbols: they are rounded up for speed, or have a few extra rows.
MULTIPLES, EXTRA_ROWS = (8, 16, 32, 64, 128, 256), 8
STAMPS = "tokenizer_stamps"  # field of a configuration
# Texts that tokenizers of the same symbols encode differently: case, accents (composed and decomposed), digits, spaces,
# punctuation, other scripts, and text like a control token. A changed word changes the stamps of all models.
PROBES = (
    "The old house, which she HAD seen in 1987, wasn't sold; it cost 3.50 -- didn't it?",
    "Größe, façade, nai\u0308ve, Über; \u201eZitat\u201c \u2013 (so)!",
    "  two  spaces\tand a tab </s> <pad> \u2581_ ",
    "\u6211\u4eec\u53bb\u5317\u4eac\u3002\uff21\u3000\u041f\u0440\u0438\u0432\u0435\u0442 \u03a3\u03af \ufb01",
)


class TokenizerPair:
    """
    The tokenizers of a model. Unpacks into source and target: `source, target = pair`.

    Args:
        source (`PreTrainedTokenizerBase`): Tokenizer of the source.
        target (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the target; defaults to that of the source.
        relations ([`~recnmt_hf.data.Relations`], *optional*): Of a model that reads dependency trees.
    """

    def __init__(
        self,
        source: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase | None = None,
        relations: Relations | None = None,
    ):
        self.source, self.relations = source, relations
        self.target = source if target is None else target

    def __iter__(self) -> Iterator[PreTrainedTokenizerBase]:
        return iter((self.source, self.target))

    @property
    def is_joint(self) -> bool:
        """`True` if source and target have one tokenizer."""
        return self.target is self.source

    @classmethod
    def load(
        cls, path: str | Path, *, source_subfolder: str = "", trust_remote_code: bool = False, **kwargs: Any
    ) -> TokenizerPair:
        """
        Load the tokenizers of a model, as [`save`] and training write them.

        Args:
            path (`str` or `Path`): Folder or model id. The target's own tokenizer is in the subfolder
                `target_tokenizer`; without one, the source's tokenizer is used for both sides.
            source_subfolder (`str`, *optional*): Subfolder of a local folder with the tokenizer of the source.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Run code in the files without a prompt.
            **kwargs: Those of `from_pretrained`, e.g. `revision=...`.

        Raises:
            ValueError: A tokenizer is missing, or cannot be loaded.
        """
        place = str(Path(path) / source_subfolder) if source_subfolder else str(path)
        source = load_unchecked(place, "tokenizer of", trust_remote_code=trust_remote_code, **kwargs)
        target = load_target_tokenizer(str(path), trust_remote_code=trust_remote_code, **kwargs)
        return cls(source, target, Relations.load(path, **kwargs))

    def save(self, folder: str | Path, *, source_subfolder: str = "") -> None:
        """Save the tokenizers for [`load`] with the same `source_subfolder`; one for both sides is saved once."""
        self.source.save_pretrained(str(Path(folder) / source_subfolder))
        self.save_beside_source(folder)

    def save_beside_source(self, folder: str | Path) -> None:
        """Save the target's own tokenizer and the relations, if there are any, without the tokenizer of the source."""
        if not self.is_joint:
            self.target.save_pretrained(str(Path(folder) / TARGET_TOKENIZER))
        if self.relations is not None:
            self.relations.save(folder)

    def tree_encoder(self, model_config: Any) -> TreeEncoder | None:
        """Return the encoder of dependency trees for a model; `None` if it reads none or `relations` is missing."""
        options = tree_options(model_config)
        if options is None or self.relations is None:
            return None
        return TreeEncoder(self.source, self.relations, **options)

    def check(self, model: Any, strict: bool = True) -> None:
        """
        Check that a model was trained with these tokenizers.

        They must have a padding token, no more symbols than the embeddings have rows, and on both sides the model's
        padding id. They must match the stamps of [`stamp_tokenizers`], as training writes them. Without stamps the
        embeddings may have more rows than there are symbols only if they are rounded up to a multiple of 8 to 256, or
        have a few more. The end-of-sentence ids, and the control tokens of the generation settings, must agree.

        Args:
            model (`PreTrainedModel`): A model, or an object with its `config` and `generation_config`.
            strict (`bool`, *optional*, defaults to `True`): `False` checks only the requirements of translation.

        Raises:
            ValueError: It was trained with others, or a tokenizer has no padding token.
        """
        config, generation = model.config, getattr(model, "generation_config", None)
        stamps = getattr(config, STAMPS, None) or {}
        ends = ids_of(config, "eos_token_id") | ids_of(generation, "eos_token_id")
        for side, tokenizer, rows in zip(("source", "target"), self, vocabulary_sizes(config), strict=True):
            is_target, difference = side == "target", ""
            size = number_of_symbols(tokenizer, is_target)
            is_rounded = rows - size <= EXTRA_ROWS or rows in {-(-size // step) * step for step in MULTIPLES}
            if tokenizer.pad_token_id is None:
                difference = "has no padding token"
            elif size > rows or (strict and side not in stamps and not is_rounded):
                difference = f"has {size} symbols, but the model's embedding has {rows} rows"
            elif strict and side in stamps:
                expected, own = stamps[side], stamp(tokenizer, stamps[side].get("symbols"), is_target)
                if own["sha256"] != expected.get("sha256"):
                    difference = "does not have the symbols that the model was trained with"
                elif expected.get("behaviour") not in (None, own.get("behaviour")):  # earlier releases have none
                    difference = "encodes text differently from the one that the model was trained with"
            if strict and is_target and (not ends or tokenizer.eos_token_id not in {None, *ends}):
                end = min(ends, default=None)
                difference = f"ends sentences with token {tokenizer.eos_token_id}, the model with eos_token_id={end}"
            if difference:
                remedy = "Use the model's own (check=False skips this check), or stamp_tokenizers after training"
                raise UserError(f"The {side} tokenizer {difference}. {remedy}.", field=f"{side} tokenizer")
        if strict:
            self.check_padding(getattr(config, "pad_token_id", None))
            for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
                trained, used = ids_of(config, name), ids_of(generation, name)
                if trained and used and not trained & used:
                    values = f"{min(used)} in generation_config.json, but {min(trained)} in config.json"
                    raise UserError(f"{name} is {values}. Write the one used in training into both.", field=name)

    def check_padding(self, pad_token_id: int | None = None) -> None:
        """Raise `ValueError` for different padding ids: a model has one, whose row is zero and never trained."""
        source, target = (tokenizer.pad_token_id for tokenizer in self)
        named = {"source tokenizer": source, "target tokenizer": target, "model": pad_token_id}
        if len({*named.values()} - {None}) > 1:
            ids = ", ".join(f"{name} {id}" for name, id in named.items() if id is not None)
            remedy = "Use tokenizers with the same padding id; `recnmt tokenizer` sets it to 0"
            raise UserError(f"The padding ids differ ({ids}), but a model has one. {remedy}.")


def load_target_tokenizer(path: str, **kwargs: Any) -> PreTrainedTokenizerBase | None:
    """Load the target tokenizer of a model with two vocabularies; `None` if one tokenizer serves both sides."""
    is_separate = (Path(path) / TARGET_TOKENIZER).is_dir()
    if not is_separate and optional_file(path, f"{TARGET_TOKENIZER}/tokenizer_config.json", **kwargs) is None:
        return None
    # Without this configuration transformers would look for one in the subfolder, an error for files of the Hub.
    settings = {"config": PreTrainedConfig(), **kwargs}
    return load_unchecked(path, "target tokenizer of", subfolder=TARGET_TOKENIZER, **settings)


def vocabulary_sizes(config: Any) -> tuple[int, int]:
    """Return the numbers of source and target token ids; each side may have a configuration of its own."""
    own = getattr(config, "vocab_size", None)
    source, target = (own if own is not None else getattr(config, side).vocab_size for side in ("encoder", "decoder"))
    return source, getattr(config, "decoder_vocab_size", None) or target


def number_of_symbols(tokenizer: PreTrainedTokenizerBase, is_target: bool = False) -> int:
    """Return the number of symbols. MarianMT may have one vocabulary per side; M2M-100 does not count its languages."""
    separate, languages = getattr(tokenizer, "target_encoder", None), getattr(tokenizer, "lang_code_to_id", None)
    if is_target and isinstance(separate, Mapping):
        return len(separate)
    ids = languages.values() if isinstance(languages, Mapping) else ()
    return max(len(tokenizer), *(id + 1 for id in ids if id is not None), 0)


def stamp_tokenizers(
    config: PreTrainedConfig, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase | None = None
) -> None:
    """
    Write stamps of a model's tokenizers, `source` and `target` (by default the same), into its `config`, so that others
    are rejected. Tokens that are added later at the end of the vocabulary have no effect on them.
    """
    setattr(config, STAMPS, {"source": stamp(source), "target": stamp(target or source, is_target=True)})


def stamp(tokenizer: PreTrainedTokenizerBase, size: int | None = None, is_target: bool = False) -> dict[str, Any]:
    """Return number and checksum of the (first `size`) symbols, and of encodings unless these are random or fail."""

    def checksum(text: str) -> str:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    symbols = sorted((id, token) for token, id in tokenizer.get_vocab().items() if size is None or id < size)
    size = 1 + symbols[-1][0] if size is None and symbols else size
    result = {"symbols": size, "sha256": checksum("\n".join(f"{id} {token}" for id, token in symbols))}
    language = min(language_ids(tokenizer), default=None)  # every text is encoded in its own
    # The vocabulary may have no symbol of the texts, so some of its own are encoded too.
    own = [token.replace("\u2581", " ") for _, token in symbols[:: max(1, len(symbols) // 64)]]
    probes = [*PROBES, *own, *(token.swapcase() for token in own)]
    with suppress(Exception), in_languages(tokenizer, language, language):
        # The `tokenizers` library raises no other kind for a vocabulary without an unknown token.
        first, *others = (
            [[int(id) for id in encode_plain(tokenizer, text, is_target)["input_ids"]] for text in probes]
            for _ in range(3)  # since subwords may be sampled
        )
        if others == [first, first]:
            result["behaviour"] = checksum(json.dumps(first))
    return result


def ids_of(settings: Any, name: str) -> set[Any]:
    """Return the token ids of a setting: one, several or none."""
    value = getattr(settings, name, None)
    return set(value) if isinstance(value, (list, tuple)) else {value} - {None}
