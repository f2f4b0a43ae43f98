"""SIGINT and SIGTERM: the console command cleans up and exits with 130 or 143, whatever it is doing."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


# Seconds in which a second signal counts as the first one: launchers pass on what the terminal has sent already.
SAME_REQUEST = 1.0
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Interrupts:
    """
    Handler of SIGINT and SIGTERM. The first signal raises `KeyboardInterrupt` in the command's work, so that files are
    cleaned up. A later one, or one before or after the work, ends the process at once.

    Attributes:
        received (`list[int]`): The signals so far. Libraries may turn `KeyboardInterrupt` into another error.
        is_working (`bool`): Whether `KeyboardInterrupt` would be handled.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_working = False
        self.process = os.getpid()
        self.first = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # forked by a library, which ends its processes as it is used to
            if number == signal.SIGINT:
                signal.default_int_handler(number, frame)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received.append(number)
        if self.is_working and len(self.received) == 1:
            self.first = time.monotonic()
            raise KeyboardInterrupt
        if self.is_working and time.monotonic() - self.first < SAME_REQUEST:
            return
        if len(self.received) == 1:
            os.write(2, f"\nrecnmt: {self.word()}.\n".encode())
        os._exit(self.exit_code())

    def exit_code(self) -> int:
        return 128 + (self.received or [signal.SIGINT])[0]

    def word(self) -> str:
        return WORDS[signal.Signals((self.received or [signal.SIGINT])[0])]

    def install(self) -> dict[int, Any]:
        """Handle the signals that nobody handles; return their handlers so far. Threads handle none."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        numbers: list[int] = [signal.SIGINT]
        # A launcher that ends its processes must not wait for one that is stuck in a collective operation.
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            numbers.append(signal.SIGTERM)
        handlers = {number: signal.getsignal(number) for number in numbers}
        unhandled = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: handler for number, handler in handlers.items() if handler in unhandled}
        for number in before:
            signal.signal(number, self)
        return before


_of_command: Interrupts | None = None


def handle_from_now_on() -> None:
    """For the console command: handle signals until the process ends, also while modules are imported."""
    global _of_command
    _of_command = Interrupts()
    numbers = _of_command.install()

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    # Registered first, it runs last: what follows takes no handlers, and a signal would replace the exit code.
    atexit.register(ignore)


@contextmanager
def raised_interrupts() -> Iterator[Interrupts]:
    """Raise `KeyboardInterrupt` for SIGINT and SIGTERM. Handlers that a caller has installed stay."""
    interrupts = _of_command or Interrupts()
    before = interrupts.install()
    interrupts.is_working = True
    try:
        yield interrupts
    finally:
        interrupts.is_working = False
        for number, handler in before.items():
            if signal.getsignal(number) is interrupts:
                signal.signal(number, handler)
