"""A checked copy of a trained model, whose only code is that of the installed packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..data.tokenizer_pair import TokenizerPair
from ..inference.loading import load_model
from ..inference.model_checks import check_weights
from ..models.user_errors import MissingFileError, UserError
from ..training.output_folder import FINAL


# transformers' own limit of a file of weights.
SHARD = "50GB"


def model_folder(path: str | Path) -> Path:
    """Return the folder of a model, or that of a run's final model."""
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    if (path / FINAL / "config.json").is_file():
        return path / FINAL
    raise MissingFileError(
        f"{path} holds no model (config.json is missing). Remedy: give a run's folder, that of its model, or one that "
        "save_pretrained wrote."
    )


def write_checked_copy(
    folder: Path, copy: Path, adjust: Callable[[Any], None] = lambda model: None, shard: str = SHARD
) -> None:
    """
    Load a model and its tokenizers with the checks of `recnmt translate`, and save them. No code of the folder runs or
    is copied, and the copy refers to no code of other repositories, so it can be loaded with `trust_remote_code=True`.

    Args:
        folder (`Path`): Folder of the model.
        copy (`Path`): An empty folder, or a new one.
        adjust (`Callable`, *optional*): Changes the model before it is saved.
        shard (`str`, *optional*): Largest file of weights.

    Raises:
        ValueError: The model is incomplete or brings foreign code, or its tokenizers are not its own.
    """
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds adapters of a model. Remedy: merge them (merge_and_unload) and save the whole model, or "
            "push them with peft."
        )
    model: Any = load_model(folder, "cpu")
    check_weights(model)
    tokenizers = TokenizerPair.load(folder)
    tokenizers.check(model)
    adjust(model)
    # An entry may name code of any repository or folder. Saving enters the code that was loaded.
    vars(model.config).pop("auto_map", None)
    model.save_pretrained(copy, max_shard_size=shard)
    tokenizers.save(copy)
