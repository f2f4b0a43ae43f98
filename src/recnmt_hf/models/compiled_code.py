"""Small parts in C, made on the user's machine by its own compiler, where there is one; nothing needs them."""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from transformers.utils import logging

from .user_errors import UserError


logger = logging.get_logger(__name__)

FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-shared", "-fPIC")
# Seconds after which a compiler has failed.
PATIENCE = 60


def compiler() -> list[str] | None:
    """
    Return the command that `CC` names, or the first C compiler on the path.

    Raises:
        ValueError: `CC` is not a command.
    """
    given = os.environ.get("CC", "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise UserError(
            f"CC={given!r} is not a command ({error}). Remedy: correct the environment variable, or unset it."
        ) from error
    if named:
        return named if shutil.which(named[0]) else None
    return next(([found] for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def compiled(source: str) -> ctypes.CDLL | None:
    """
    A library from C, for this very processor. It lasts as long as the process: no file stays behind, none can be
    outdated, or come from somebody else.

    Returns:
        `None`, and a line of the log at level info, where there is no compiler, or it fails.
    """
    command = compiler()
    if command is None:
        logger.info("No C compiler was found (CC, cc, gcc, clang): parts in C are left out.")
        return None
    # Without the flag of this processor where a compiler does not know it.
    for flags in (["-march=native"], []):
        try:
            with tempfile.TemporaryDirectory(prefix="recnmt_hf_") as folder:
                library = Path(folder, "compiled.so")
                subprocess.run(
                    [*command, *flags, *FLAGS, "-x", "c", "-o", str(library), "-"],
                    input=source.encode(),
                    check=True,
                    capture_output=True,
                    timeout=PATIENCE,
                )
                return ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError) as error:
            text = getattr(error, "stderr", None) or b""
            logger.info(f"{shlex.join(command)} made no library: {error} {text.decode(errors='replace')}".rstrip())
    return None
