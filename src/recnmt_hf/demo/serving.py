"""Serve the page: its address, temporary files, and a clean end."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch


if TYPE_CHECKING:
    import gradio


def serve(models: Sequence[str | Path], host: str = "127.0.0.1", **settings: Any) -> None:
    """
    Serve the page of some models until the process is interrupted. Nothing is stored, and the temporary folder is
    deleted at the end.

    Args:
        models (sequence of `str` or `Path`): Folders of trained or exported models, or model ids of the Hub.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address; `"0.0.0.0"` accepts connections from
            other machines.
        **settings: `port` (default: the first free one from 7860), `share` (a public link through gradio's servers),
            `open_browser` (whether to open the page), `loading` and limits as for [`build_page`], and `allowed_hosts`:
            further names of the page, such as that of a proxy; `"*"` allows all. A request for another name is refused:
            a foreign web page may have led its own name to this machine.

    Raises:
        UserError: As [`build_page`].
        OSError: The port is in use, or the host is not an address of this machine.
    """
    with serving(models, host, **settings) as blocks:
        print(f"{blocks.share_url or blocks.local_url} (Ctrl-C stops the server)", flush=True)
        threading.Event().wait()


@contextmanager
def serving(
    models: Sequence[str | Path],
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    open_browser: bool = False,
    loading: dict[str, Any] | None = None,
    allowed_hosts: Sequence[str] = (),
    **limits: Any,
) -> Iterator[gradio.Blocks]:
    """Serve the page as [`serve`] does, until the context ends."""
    with tempfile.TemporaryDirectory(prefix="recnmt-demo-") as folder:
        environment = {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        with patch.dict(os.environ, environment):
            from .page import build_page, launch_settings  # which explains what is not installed

            blocks = build_page(models, loading, **limits)
            from starlette.middleware import Middleware
            from starlette.middleware.trustedhost import TrustedHostMiddleware

            # gradio's servers choose the name of a public link.
            hosts = ["*"] if share else [*hosts_of(host), *allowed_hosts]
            settings = launch_settings()
            settings["app_kwargs"] = {"middleware": [Middleware(TrustedHostMiddleware, hosts, www_redirect=False)]}
            settings |= {"server_name": host, "server_port": port, "share": share, "inbrowser": open_browser}
            try:
                blocks.launch(prevent_thread_lock=True, quiet=True, inline=False, **settings)
                yield blocks
            finally:
                blocks.close(verbose=False)


def hosts_of(host: str) -> list[str]:
    """Return the names under which browsers reach an address; `*.7` is any that ends in `.7`."""
    hosts = [host, f"[{host}]", "localhost", "127.0.0.1", "[::1]", socket.gethostname()]
    # An address of all networks has the addresses of this machine. No other name ends in a number.
    return hosts + [f"*.{number}" for number in range(256)] if host in ("0.0.0.0", "::") else hosts
