"""A checked copy of a trained model, with the code of the installed package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._loading_errors import FINAL, folder_of_model, looks_local
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError, short_repr
from ..inference.backends.torch_model import check_weights
from ..inference.loading import check_folder, load_model


SHARD = "50GB"  # transformers' own limit of a file of weights


def model_folder(path: str | Path) -> Path:
    """Return the folder of a model, or that of a run's final model; `UserError` if there is none."""
    folder = Path(folder_of_model(path))
    check_folder(folder)
    return folder


def short_name(model: str | Path) -> str:
    """Return the last part of a folder or model id; for the folder of a run's final model that of the run."""
    path = Path(model).absolute() if looks_local(str(model)) else Path(model)
    return path.parent.name if path.is_absolute() and path.name == FINAL else path.name


def check_fields(config: Any, engine: str, needed: Mapping[str, Sequence[Any]]) -> None:
    """Raise `UserError` unless a configuration is that of a base Transformer whose fields have values of `needed`."""
    for name, allowed in {"model_type": ("nmt_transformer",), **needed}.items():
        if (value := getattr(config, name)) not in allowed:
            message = f"{engine} does not support {name}={short_repr(value)}. Use `recnmt translate`."
            raise UserError(message, field=name)


def load_checked(source: str | Path, **kwargs: Any) -> tuple[Any, TokenizerPair]:
    """Load a model with the checks of `recnmt translate`; no code of its folder is run."""
    source = folder_of_model(source)
    model, tokenizers = load_model(source, "cpu", **kwargs), TokenizerPair.load(source, **kwargs)
    check_weights(model)
    tokenizers.check(model)
    return model, tokenizers


def write_checked_copy(folder: Path, copy: Path, shard: str = SHARD) -> None:
    """
    Save what [`load_checked`] loads in an empty or new folder, without any code of the folder, and without references
    to other repositories, so that the copy can be loaded with `trust_remote_code=True`.
    """
    model, tokenizers = load_checked(folder)
    if not type(model).__module__.startswith(("recnmt_hf.", "transformers.")):
        raise UserError(f"{folder} has the class {type(model).__qualname__}, which is not published.", field=folder)
    # The entry may name code of any repository or folder. Saving adds the code that was loaded.
    vars(model.config).pop("auto_map", None)
    model.save_pretrained(copy, max_shard_size=shard)
    tokenizers.save(copy)
