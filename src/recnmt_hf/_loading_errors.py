"""Places and files of models, read within bounds, and plain errors for what cannot be loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import MissingFileError, UserError, shorten


FINAL = "model"  # folder of the final model in that of a run
# Limit of files that are read as a whole. Without it, a link to a device such as /dev/zero would fill the memory.
MAX_BYTES = 2**26
PLACE_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")  # those that also apply to single files


def looks_local(path: str) -> bool:
    """Return whether the name of a model is a path: an existing one, or one that cannot be a model id."""
    return Path(path).exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def folder_of_model(path: str | Path) -> str:
    """Return the final model's folder for that of a run, and every other path or model id as it is."""
    path, final = str(path), Path(path) / FINAL
    has_own = not path or (Path(path) / "config.json").is_file()
    return path if has_own or not (final / "config.json").is_file() else str(final)


def optional_file(path: str | Path, name: str, **kwargs: Any) -> Path | None:
    """Return a file of a model's folder or repository, `None` without it; `kwargs` are those of `from_pretrained`."""
    if looks_local(str(path)):
        return Path(path) / name if (Path(path) / name).is_file() else None
    from transformers.utils import cached_file, has_file

    place = {key: value for key, value in kwargs.items() if key in PLACE_ARGUMENTS}
    with explained_loading(path, f"{name} of"):
        return Path(str(cached_file(str(path), name, **place))) if has_file(str(path), name, **place) else None


def read_bounded(file: IO[bytes], name: str, most: int = MAX_BYTES) -> bytes:
    """Read the rest of an open file; `UserError` if it has more than `most` bytes, before they fill the memory."""
    parts: list[bytes] = []
    while part := file.read(2**20):
        most -= len(part)
        if most < 0:
            raise UserError(f"{name} is larger than any file of this kind, perhaps after decompression.", field=name)
        parts.append(part)
    return b"".join(parts)


def read_small_text(path: str | Path) -> str:
    """Read a file of UTF-8 text; `UserError` if it is larger than [`MAX_BYTES`], and the errors of `Path.read_text`."""
    with open(path, "rb") as file:
        return read_bounded(file, str(path)).decode()


@contextmanager
def explained_loading(path: str | Path, what: str = "model") -> Iterator[None]:
    """Turn errors of loading a folder or model id into a [`UserError`] about the loaded object, `what`."""
    path = str(path)
    try:
        for file in Path(path).iterdir() if Path(path).is_dir() else ():
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise UserError(f"{file} is a device or a pipe.", field=file)  # it may never end
            if file.name == "generation_config.json":
                json.loads(file.read_bytes())  # transformers ignores a damaged one
        yield
    except UserError:
        raise
    except Exception as error:
        reason = shorten(f"{type(error).__name__}: {error}")
        if "trust_remote_code" in str(error):
            reason = "it contains Python code, which was not run. If you trust it, pass --trust-remote-code "
            reason += "(trust_remote_code=True). Commands without this option cannot load it"
        kind = MissingFileError if isinstance(error, OSError) and not Path(path).exists() else UserError
        if kind is MissingFileError:
            reason = f"no such folder here, and as a model id of the Hub: {reason}"
        raise kind(f"The {what} {path} cannot be loaded: {reason}.", field=path) from error
