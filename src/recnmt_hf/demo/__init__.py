"""A local web page to try trained models: `recnmt demo`."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names, names_for_type_checkers


if TYPE_CHECKING:
    from .limits import Limits as Limits
    from .page import build_page as build_page
    from .page import launch_settings as launch_settings
    from .serving import serve as serve

_NAMES = names_for_type_checkers(__name__)
__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
