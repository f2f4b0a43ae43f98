"""Old name of the packages `inference` and `metrics`, deprecated."""

import warnings
from typing import Any

from . import inference, metrics


def __getattr__(name: str) -> Any:
    for package in (inference, metrics):
        if name in package.__all__:
            warnings.warn(f"recnmt_hf.evaluation.{name} is now {package.__name__}.{name}.", FutureWarning, stacklevel=2)
            return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
