"""A local web page to try trained models: `recnmt demo`."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


if TYPE_CHECKING:
    from .limits import Limits as Limits
    from .page import build_page as build_page
    from .page import launch_settings as launch_settings
    from .serving import serve as serve

__getattr__, __dir__, __all__ = lazy_names(__name__)
