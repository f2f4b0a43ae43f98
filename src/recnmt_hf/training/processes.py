"""Processes of a run: start, waiting for the first one, logging, end with their launcher."""

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState

from .._interrupts import end_with_parent
from ..data.files import PREFIX


T = TypeVar("T")


class MainProcessHandler(logging.Handler):
    """Handler that writes messages of the main process to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        if PartialState().is_main_process:
            print(self.format(record), file=sys.stderr, flush=True)


# Logger for the progress of commands and runs.
logger = logging.getLogger("recnmt_hf.progress")
if not logger.level:  # the command `recnmt` sets its own
    logger.setLevel(logging.INFO)
logger.propagate = False
logger.addHandler(MainProcessHandler())


class Processes:
    """Processes of this run. Collectives may take `timeout` seconds. Progress bars appear on terminals alone."""

    def __init__(self, use_cpu: bool, timeout: float = 1800, ddp_backend: str | None = None):
        if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
            launcher = os.getppid()  # no orphan may write into the folder of the next run
            end_with_parent(launcher, f"The launcher (process {launcher}) has ended; this process ends too.\n")
        # The Trainer's arguments would not pass them on the CPU, or to an existing process group.
        backend = {"backend": ddp_backend} if ddp_backend else {}
        self.state = PartialState(cpu=use_cpu, timeout=timedelta(seconds=timeout), **backend)
        self.count = self.state.num_processes
        self.is_main = self.state.is_main_process
        if not (self.is_main and sys.stderr.isatty()):
            datasets.disable_progress_bars()
            transformers.utils.logging.disable_progress_bar()
        self.writes, self.has_own_folders = self.is_main, False  # see `find_writers`
        # For waiting as long as the other processes live: gloo does not spin, and detects when another one dies.
        self.waiting: Any = dist.new_group(backend="gloo", timeout=timedelta(days=365)) if self.count > 1 else None

    def on_main(self, work: Callable[[], T]) -> T:
        """Run work on the first process, and return its (pickled) result on all, which wait without timeout."""
        return self.on_chosen(self.is_main, work)[0]

    def on_writers(self, work: Callable[[], T]) -> list[T]:
        """Run work on all processes that write into an output folder, the first one first, and return their results."""
        return self.on_chosen(self.writes, work)

    def on_chosen(self, is_chosen: bool, work: Callable[[], T]) -> list[T]:
        """Run work on the chosen processes, and return their (pickled) results on all, which wait without timeout."""
        if self.waiting is None:
            return [work()]
        answers: list[Any] = [None] * self.count
        answer: tuple[bool, list[T]] = (not is_chosen, [])
        try:
            if is_chosen:
                answer = (True, [work()])
        finally:  # the others must not wait for work that failed
            dist.all_gather_object(answers, answer, group=self.waiting)
        if not all(succeeded for succeeded, _ in answers):
            time.sleep(1)  # a launcher ends all processes once one has ended; the failed one prints its error before
            raise SystemExit(2)
        return [result for _, results in answers for result in results]

    def find_writers(self, folder: Path) -> None:
        """Let the first process of each host write, unless its folder is that of the first process (a common disk)."""
        if self.waiting is None:
            return
        mark = self.on_main(partial(tempfile.mkdtemp, prefix=PREFIX, dir=folder))
        self.writes = self.is_main or (self.state.is_local_main_process and not (folder / Path(mark).name).exists())
        self.has_own_folders = len(self.on_writers(lambda: None)) > 1
        self.on_main(partial(os.rmdir, mark))

    def main_first(self, work: Callable[[], T]) -> T:
        """Run work on the first process, then on the others, which can read its files; each returns its own result."""
        results: list[T] = []
        self.on_main(lambda: results.append(work()))
        return results[0] if results else work()


@contextmanager
def settings_of_one_run() -> Iterator[None]:
    """Restore environment and accelerate when a run ends, so that later runs are independent."""
    environment = dict(os.environ)
    try:
        yield
    except BaseException:
        AcceleratorState._reset_state(reset_partial_state=True)
        raise
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
