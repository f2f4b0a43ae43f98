"""Source and target tokenizer of a model: load, save, and check them against the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import has_file

from .._loading_errors import explained_loading, looks_local
from ..errors import UserError, short_repr
from .tokenization import load_unchecked
from .tokenizer_checks import STAMPS, check_end, check_stamp, number_of_symbols, vocabulary_sizes
from .tree_inputs import RELATIONS_FILE, Relations, TreeEncoder, tree_options


# Subfolder of a model's folder for the tokenizer of a target with a separate vocabulary.
TARGET_TOKENIZER = "target_tokenizer"
# Embeddings may have more rows than the tokenizer has symbols: they are rounded up for speed, or have a few extra rows.
MULTIPLES = (8, 16, 32, 64, 128, 256)
EXTRA_ROWS = 8


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
        self.source = source
        self.target = source if target is None else target
        self.relations = relations

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
        """
        Save the tokenizers in a folder, often that of the model, for [`load`] with the same `source_subfolder`. One for
        both sides is saved once.
        """
        self.source.save_pretrained(str(Path(folder) / source_subfolder))
        self.save_beside_source(folder)

    def save_beside_source(self, folder: str | Path) -> None:
        """Save the target's own tokenizer and the relations, if there are any, without the tokenizer of the source."""
        if not self.is_joint:
            self.target.save_pretrained(str(Path(folder) / TARGET_TOKENIZER))
        if self.relations is not None:
            self.relations.save(folder)

    def tree_encoder(self, model_config: Any) -> TreeEncoder | None:
        """
        Return the encoder of the dependency trees of sources for a model, or `None` if the model reads none or
        `relations` is missing. `UserError` for a slow tokenizer, or for more relations than the model has.
        """
        options = tree_options(model_config)
        if options is None or self.relations is None:
            return None
        if len(self.relations) > model_config.num_relations:
            raise UserError(
                f"{RELATIONS_FILE} has {len(self.relations)} relations, but the model has "
                f"{model_config.num_relations}.",
                field=RELATIONS_FILE,
            )
        return TreeEncoder(self.source, self.relations, **options)

    def check(self, model: Any, strict: bool = True) -> None:
        """
        Check that a model was trained with these tokenizers.

        They must have a padding token, no more symbols than the embeddings have rows, and on both sides the model's
        padding id. If the model has stamps of its tokenizers ([`~recnmt_hf.data.tokenizer_checks.stamp_tokenizers`], as
        training writes them), they must match. Otherwise the end-of-sentence ids must agree, and the embeddings may
        have more rows than there are symbols only if they are rounded up to a multiple of 8 to 256, or have a few more.

        Args:
            model (`PreTrainedModel`): A model, or an object with its `config` and `generation_config`.
            strict (`bool`, *optional*, defaults to `True`): `False` checks only the requirements of translation.

        Raises:
            ValueError: It was trained with others, or a tokenizer has no padding token.
        """
        config = model.config
        stamps = getattr(config, STAMPS, None)
        for side, tokenizer, rows in zip(("source", "target"), self, vocabulary_sizes(config), strict=True):
            name, size = f"{side} tokenizer", number_of_symbols(tokenizer, side == "target")
            if tokenizer.pad_token_id is None:
                raise UserError(
                    f"The {name} has no padding token. Copy tokenizer_config.json from the original model, or set "
                    "tokenizer.pad_token to the one used in training.",
                    field=name,
                )
            if size > rows:
                raise UserError(
                    f"The {name} has {short_repr(size)} symbols, but the model's embedding has {rows} rows. Use the "
                    "tokenizer that the model was trained with, or resize the embeddings.",
                    field=name,
                )
            if not strict:
                continue
            if isinstance(stamps, Mapping) and isinstance(stamps.get(side), Mapping):
                check_stamp(tokenizer, stamps[side], side)
            elif rows - size > EXTRA_ROWS and rows not in {-(-size // step) * step for step in MULTIPLES}:
                raise UserError(
                    f"The {name} has {short_repr(size)} symbols, but the model's embedding has {rows} rows. Use the "
                    "tokenizer that the model was trained with, or disable this check with check=False (Python).",
                    field=name,
                )
        if strict:
            self.check_padding(getattr(config, "pad_token_id", None))
            check_end(model, self.target)

    def check_padding(self, pad_token_id: int | None = None) -> None:
        """
        Raise `ValueError` if both sides, and the model if its id is given, have different padding ids. A model has one,
        whose row is zero in both embeddings and is never trained.
        """
        source, target = (tokenizer.pad_token_id for tokenizer in self)
        named = {"source tokenizer": source, "target tokenizer": target, "model": pad_token_id}
        ids = {name: id for name, id in named.items() if id is not None}
        if len(set(ids.values())) > 1:
            raise UserError(
                f"The padding ids differ ({', '.join((f'{name} {id}' for name, id in ids.items()))}), but the model "
                "has one id for both sides. Use tokenizers with the same padding id; `recnmt tokenizer` sets it to 0."
            )


def load_target_tokenizer(path: str, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase | None:
    """
    Load the target tokenizer of a model with two vocabularies, with the arguments of `from_pretrained`. Return `None`
    if one tokenizer is used for both sides. `UserError` if it cannot be loaded.
    """
    with explained_loading(path, "target tokenizer of"):
        if looks_local(path):
            exists = (Path(path) / TARGET_TOKENIZER).is_dir()
        else:
            names = {"revision", "token", "cache_dir", "local_files_only"}
            place = {name: value for name, value in kwargs.items() if name in names}
            exists = has_file(path, f"{TARGET_TOKENIZER}/tokenizer_config.json", **place)
        if not exists:
            return None
        # Without this configuration transformers would look for one in the subfolder, an error for files of the Hub.
        settings = {"config": PreTrainedConfig(), "trust_remote_code": trust_remote_code, **kwargs}
        return load_unchecked(path, "target tokenizer of", subfolder=TARGET_TOKENIZER, **settings)
