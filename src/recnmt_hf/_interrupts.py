"""SIGINT and SIGTERM: the console command cleans up and exits with 130 or 143."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


# Seconds in which a second signal is ignored: launchers repeat signals that the terminal has sent already.
SAME_REQUEST = 1.0
# Seconds between two looks at whether the parent process lives.
WATCH_INTERVAL = 0.2
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Interrupts:
    """
    Handler of SIGINT and SIGTERM. The first signal while the command works raises `KeyboardInterrupt`, so that files
    are cleaned up. Any other ends the process at once.
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # libraries may turn KeyboardInterrupt into another error
        self.is_working = False  # whether a signal raises KeyboardInterrupt
        self.process = os.getpid()
        self.first = 0.0  # time of the first signal

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # forked by a library, which relies on the default handlers
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
        """Return the exit code of the process."""
        return 128 + (self.received or [signal.SIGINT])[0]

    def word(self) -> str:
        """Return the word for the message."""
        return WORDS[signal.Signals((self.received or [signal.SIGINT])[0])]

    def install(self) -> list[int]:
        """Handle the signals without a handler, and return them."""
        numbers: list[int] = [signal.SIGINT]
        # A launcher must be able to end a process that is stuck in a collective operation.
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            numbers.append(signal.SIGTERM)
        unhandled = (signal.SIG_DFL, signal.default_int_handler)
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [number for number in numbers if is_main and signal.getsignal(number) in unhandled]
        for number in numbers:
            signal.signal(number, self)
        return numbers


_of_command: Interrupts | None = None


def handle_from_now_on() -> None:
    """Handle signals until the process ends, also while modules are imported."""
    global _of_command
    _of_command = Interrupts()
    numbers = _of_command.install()

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    # Registered first, it runs last. A signal after it would replace the exit code.
    atexit.register(ignore)


@contextmanager
def raised_interrupts() -> Iterator[Interrupts]:
    """Raise `KeyboardInterrupt` for SIGINT and SIGTERM. Handlers of a calling program are kept."""
    interrupts = _of_command or Interrupts()
    replaced = interrupts.install()
    interrupts.is_working = True
    try:
        yield interrupts
    finally:
        interrupts.is_working = False
        for number in replaced:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def end_with_parent(parent: int, message: str = "") -> None:
    """End this process soon after the one that started it, which may be killed; print a message before."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL)
        os.write(2, message.encode())
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
