"""Source and target tokenizer of a model as one thing: loaded, saved, and checked against the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import has_file

from .._loading_errors import explain, explained_loading, is_about_files, looks_local, shorten
from .._plain_text import control_ids, encode_plain
from ..models.user_errors import UserError
from .tokenization import require_control_tokens, without_origin
from .tokenizer_checks import check_padding, check_tokenizers, stamp_tokenizers


# Subfolder of a model's folder for the tokenizer of a target with a vocabulary of its own.
TARGET_TOKENIZER = "target_tokenizer"


class TokenizerPair:
    """
    The tokenizers of a model. Unpacks into source and target: `source, target = pair`.

    Args:
        source (`PreTrainedTokenizerBase`): Of the source.
        target (`PreTrainedTokenizerBase`, *optional*): Of the target; `None`: the same one, with one vocabulary for
            both sides.
    """

    def __init__(self, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase | None = None):
        self.source = source
        self.target = source if target is None else target

    def __iter__(self) -> Iterator[PreTrainedTokenizerBase]:
        return iter((self.source, self.target))

    @property
    def is_joint(self) -> bool:
        """Whether one tokenizer serves both sides."""
        return self.target is self.source

    # -- files -------------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, path: str | Path, *, source_subfolder: str = "", trust_remote_code: bool = False, **kwargs: Any
    ) -> TokenizerPair:
        """
        Loads the tokenizers of a model, as [`save`] and training write them.

        Args:
            path (`str` or `Path`): Folder or model id. The target's own tokenizer stands in the subfolder
                `target_tokenizer`; without one, the source's serves both sides.
            source_subfolder (`str`, *optional*): Where the source's tokenizer stands in a local folder; by default in
                the folder itself.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code that the files bring along may
                run; nobody is asked.
            **kwargs: Those of `from_pretrained`, e.g. `revision=...`.

        Raises:
            ValueError: A tokenizer is not there, or cannot be loaded.
        """
        place = str(Path(path) / source_subfolder) if source_subfolder else str(path)
        with explained_loading(place, "tokenizer of"):
            source = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **kwargs)
        target = load_target_tokenizer(str(path), trust_remote_code=trust_remote_code, **kwargs)
        return cls(without_origin(source), target)

    def save(self, folder: str | Path, *, source_subfolder: str = "") -> None:
        """
        Writes the tokenizers into a folder, from where [`load`] reads them; one that serves both sides is written once.

        Args:
            folder (`str` or `Path`): The folder, often that of the model.
            source_subfolder (`str`, *optional*): As for [`load`].
        """
        self.source.save_pretrained(str(Path(folder) / source_subfolder))
        self.save_target(folder)

    def save_target(self, folder: str | Path) -> None:
        """Writes the target's own tokenizer, if there is one, for callers that have the source's written already."""
        if not self.is_joint:
            self.target.save_pretrained(str(Path(folder) / TARGET_TOKENIZER))

    # -- models ------------------------------------------------------------------------------------------------------

    def check(self, model: PreTrainedModel, strict: bool = True) -> None:
        """
        Refuses a model that was trained with other tokenizers;
        [`~recnmt_hf.data.tokenizer_checks.check_tokenizers`] says how that is found out.

        Raises:
            ValueError: They are others, or cannot serve any model.
        """
        check_tokenizers(model, self.source, self.target, strict)

    def check_padding(self, pad_token_id: int | None = None) -> None:
        """Raises `ValueError` when both sides, and a model where its id is given, do not pad with the same id."""
        check_padding(self.source, self.target, pad_token_id)

    def require_control_tokens(self, place: str | Path) -> None:
        """Raises `ValueError` when one has no padding or end-of-sentence token; `place` is where they are from."""
        for tokenizer in dict.fromkeys(self):
            require_control_tokens(tokenizer, place)

    def stamp(self, config: PreTrainedConfig) -> None:
        """Writes into a model's configuration that it is trained with these, so that others are refused."""
        stamp_tokenizers(config, self.source, self.target)

    # -- text --------------------------------------------------------------------------------------------------------

    def encode_source(self, sentence: str) -> list[int]:
        """Token ids of a source sentence, in which `</s>` and the like are text."""
        return encode_plain(self.source, sentence)["input_ids"]

    def encode_target(self, sentence: str) -> list[int]:
        """Token ids of a target sentence, in which `</s>` and the like are text."""
        return encode_plain(self.target, sentence, is_target=True)["input_ids"]

    def control_ids(self) -> tuple[set[int], set[int]]:
        """For source and target the ids of tokens that stand for no text."""
        return control_ids(self.source), control_ids(self.target)


def load_target_tokenizer(path: str, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase | None:
    """
    The target tokenizer of a model whose target has a vocabulary of its own; `None` where one serves both sides.

    Args:
        path: Folder or model id.
        trust_remote_code: Whether code that its files bring along may run.
        **kwargs: Those of `from_pretrained`.

    Raises:
        ValueError: It is there and cannot be loaded.
    """
    try:
        if looks_local(path):
            is_there = (Path(path) / TARGET_TOKENIZER).is_dir()
        else:
            known = {"revision", "token", "cache_dir", "local_files_only"}
            place = {name: value for name, value in kwargs.items() if name in known}
            is_there = has_file(path, f"{TARGET_TOKENIZER}/tokenizer_config.json", **place)
        if not is_there:
            return None
        # Without a configuration it would be looked for in the subfolder, which of the Hub's files is an error.
        settings = {"config": PreTrainedConfig(), "trust_remote_code": trust_remote_code, **kwargs}
        return without_origin(AutoTokenizer.from_pretrained(path, subfolder=TARGET_TOKENIZER, **settings))
    except Exception as error:
        if not is_about_files(error):
            raise
        if "trust_remote_code" in str(error):
            raise UserError(explain(error, path, "target tokenizer of")) from error
        raise UserError(
            f"The target tokenizer of {path} cannot be loaded ({shorten(str(error))}). Remedy: see that "
            f"{TARGET_TOKENIZER}/tokenizer.json is whole there and may be read, or load it yourself and pass it as "
            "target_tokenizer."
        ) from error
