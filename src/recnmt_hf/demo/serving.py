"""Serve the page: address, temporary files, and a clean end."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._extras import packages_of_extra
from ..errors import UserError


if TYPE_CHECKING:
    import gradio

# Ports that are tried if none is given.
PORTS = range(7860, 7960)


def serve(
    models: Sequence[str | Path],
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    open_browser: bool = False,
    loading: dict[str, Any] | None = None,
    allowed_hosts: Sequence[str] = (),
    **limits: Any,
) -> None:
    """
    Serve the page of some models until the process is interrupted. Nothing is stored: uploaded files are deleted once
    they are read, and the temporary folder is deleted at the end.

    Args:
        models (sequence of `str` or `Path`): Folders of trained or exported models, or model ids of the Hub.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address; `"0.0.0.0"` accepts connections from
            other machines.
        port (`int`, *optional*): Port; by default the first free one from 7860.
        share (`bool`, *optional*, defaults to `False`): Whether to make a public link through gradio's servers.
        open_browser (`bool`, *optional*, defaults to `False`): Whether to open the page in the default browser.
        allowed_hosts (sequence of `str`, *optional*): Further names of the page, such as that of a proxy; `"*"` allows
            all. A request for another name is refused: a foreign web page may have led its own name to this machine.
        loading, **limits: As for [`build_page`].

    Raises:
        UserError: As [`build_page`]; the port is in use, or the host is not an address of this machine.
    """
    with serving(models, host, port, share, open_browser, loading, allowed_hosts, **limits) as blocks:
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
    free_port(host, port)  # an error before the models are loaded
    with gradio_environment():
        with packages_of_extra("demo", "The page"):
            from starlette.middleware import Middleware
            from starlette.middleware.trustedhost import TrustedHostMiddleware
        from .page import build_page, launch_settings

        blocks = build_page(models, loading, **limits)
        # gradio's servers choose the name of a public link.
        hosts = ["*"] if share else [*hosts_of(host), *allowed_hosts]
        settings = launch_settings(**limits)
        settings["app_kwargs"] = {"middleware": [Middleware(TrustedHostMiddleware, hosts, www_redirect=False)]}
        try:
            blocks.launch(
                server_name=host,
                server_port=free_port(host, port),  # again, since another server may have started meanwhile
                share=share,
                inbrowser=open_browser,
                prevent_thread_lock=True,
                quiet=True,
                inline=False,
                **settings,
            )
            yield blocks
        finally:
            blocks.close(verbose=False)


def hosts_of(host: str) -> list[str]:
    """Return the names under which browsers reach an address; `*.7` is any that ends in `.7`."""
    hosts = [host, f"[{host}]", "localhost", "127.0.0.1", "[::1]", socket.gethostname()]
    # An address of all networks has the addresses of this machine. No other name ends in a number.
    return hosts + [f"*.{number}" for number in range(256)] if host in ("0.0.0.0", "::") else hosts


@contextmanager
def gradio_environment() -> Iterator[None]:
    """Give gradio a temporary folder that is deleted at the end, and disable its requests to the internet."""
    with tempfile.TemporaryDirectory(prefix="recnmt-demo-") as folder:
        values = {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def free_port(host: str, port: int | None) -> int:
    """
    Return a port that can be bound: the given one, or the first free one of [`PORTS`].

    Raises:
        UserError: The port is in use, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0))
    except OSError as error:
        raise UserError(
            f"{host} is not an address of this machine ({error.strerror or str(error)}). Use 127.0.0.1, or 0.0.0.0 "
            "for other machines.",
            field=host,
        ) from error
    for candidate in PORTS if port is None else [port]:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address[0], candidate))
            return candidate
    raise UserError(
        f"{host}:{PORTS[0] if port is None else port} cannot be used: the port is taken or reserved. Choose another "
        "one with --port.",
        field=f"{host}:{PORTS[0] if port is None else port}",
    )
