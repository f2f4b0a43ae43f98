"""SIGINT and SIGTERM: the console command cleans up and exits with 130 or 143."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


# Seconds in which a second signal is ignored: launchers repeat signals that the terminal has sent already.
SAME_REQUEST = 1.0
WATCH_INTERVAL = 0.2  # seconds between two looks at whether the parent process lives


class Interrupts:
    """Handler of SIGINT and SIGTERM: the first raises `KeyboardInterrupt` (files are cleaned up), a later one exits."""

    def __init__(self) -> None:
        self.received: list[int] = []  # libraries may turn KeyboardInterrupt into another error
        self.process = os.getpid()
        self.first = 0.0  # time of the first signal

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # forked by a library, which relies on the default handlers
            signal.signal(number, DEFAULTS[number])
            signal.raise_signal(number)
            return
        self.received.append(number)
        if len(self.received) == 1:
            self.first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self.first >= SAME_REQUEST:
            os._exit(self.exit_code())

    def exit_code(self) -> int:
        """Return the exit code of the process."""
        return 128 + (self.received or [signal.SIGINT])[0]


DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def raised_interrupts() -> Iterator[Interrupts]:
    """Raise `KeyboardInterrupt` for SIGINT and SIGTERM. Handlers of a calling program are kept."""
    interrupts = Interrupts()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number, default in DEFAULTS.items() if is_main and signal.getsignal(number) is default]
    if "TORCHELASTIC_RUN_ID" in os.environ and signal.SIGTERM in numbers:
        numbers.remove(signal.SIGTERM)  # a launcher must be able to end a process that is stuck
    for number in numbers:
        signal.signal(number, interrupts)
    try:
        yield interrupts
    finally:
        for number in numbers:
            signal.signal(number, DEFAULTS[number])


def end_with_parent(parent: int, message: str = "") -> None:
    """End this process soon after the one that started it, which may be killed; print a message before."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL)
        os.write(2, message.encode())
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
