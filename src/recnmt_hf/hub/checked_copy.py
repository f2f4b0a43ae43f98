"""A checked copy of a trained model, with the code of the installed package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._loading_errors import FINAL, folder_of_model, looks_local
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError, short_repr
from ..inference.loading import load_model, missing_model_error
from ..inference.model_checks import check_weights
from ..models.configuration_nmt_transformer import NMTTransformerConfig


# Default of transformers for the maximum size of a file of weights.
SHARD = "50GB"


def model_folder(path: str | Path) -> Path:
    """Return the folder of a model, or that of a run's final model; `UserError` if there is none."""
    folder = Path(folder_of_model(path))
    if not (folder / "config.json").is_file():
        raise missing_model_error(str(path))
    return folder


def short_name(model: str | Path) -> str:
    """Return the last part of a folder or model id; for the folder of a run's final model that of the run."""
    path = Path(model).absolute() if looks_local(str(model)) else Path(model)
    return path.parent.name if path.is_absolute() and path.name == FINAL else path.name


def check_fields(config: Any, engine: str, needed: Mapping[str, Sequence[Any]]) -> None:
    """Raise `UserError` unless a configuration is that of a base Transformer whose fields have values of `needed`."""
    if config.model_type != NMTTransformerConfig.model_type:
        raise UserError(
            f"{engine} does not support {config.model_type}. Export an nmt_transformer, or run this model with "
            "`recnmt translate`, e.g. with --quantization int8."
        )
    for name, allowed in needed.items():
        if (value := getattr(config, name)) not in allowed:
            raise UserError(
                f"{engine} does not support {name}={short_repr(value)}. Use `recnmt translate`, or train a model "
                "without it.",
                field=name,
            )


def load_checked(
    source: str | Path, check: Callable[[Any], None] = lambda model: None, **kwargs: Any
) -> tuple[Any, TokenizerPair]:
    """
    Load a model and its tokenizers with the checks of `recnmt translate`, and with `check` before that of the
    tokenizers; no code of its folder is run. Other arguments are those of `from_pretrained`, e.g. `revision`.
    """
    source = folder_of_model(source)
    model = load_model(source, "cpu", **kwargs)
    check_weights(model)
    check(model)
    tokenizers = TokenizerPair.load(source, **kwargs)
    tokenizers.check(model)
    return model, tokenizers


def write_checked_copy(
    folder: Path, copy: Path, adjust: Callable[[Any], None] = lambda model: None, shard: str = SHARD
) -> None:
    """
    Save what [`load_checked`] loads in an empty or new folder. `adjust` changes the model first, `shard` is the maximum
    size of a file of weights. No code of the folder is copied, and the copy refers to no other repository, so it can be
    loaded with `trust_remote_code=True`.
    """
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} contains an adapter. Merge it (merge_and_unload) and save, or push it with peft.", field=folder
        )
    model, tokenizers = load_checked(folder)
    if not type(model).__module__.startswith(("recnmt_hf.", "transformers.")):
        raise UserError(
            f"{folder} has the class {short_repr(type(model).__qualname__)}, and cards and uploads support only those "
            "of this package and of transformers. Write README.md yourself, and upload the folder with "
            "huggingface_hub.",
            field=folder,
        )
    adjust(model)
    # The entry may name code of any repository or folder. Saving adds the code that was loaded.
    vars(model.config).pop("auto_map", None)
    model.save_pretrained(copy, max_shard_size=shard)
    tokenizers.save(copy)
