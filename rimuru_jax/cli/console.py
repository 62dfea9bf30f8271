"""What commands say on stderr while they work. Answers go to stdout by plain `print`."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def note(text: str) -> None:
    """A line for people."""
    print(f"rimuru: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on a terminal, one line elsewhere; gives a function of the fraction done, 0 to 1, and what is being done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        note(text)
        yield lambda fraction, text: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(text, total=1.0)
        yield lambda fraction, text: bar.update(task, completed=fraction, description=text)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Callable[[], None]]:
    """A spinner on a terminal until the function it gives is called."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    status = console.status(text)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into an answer of True, so that the engine is left between two steps and not within one.

    The second raises KeyboardInterrupt as usual.
    """
    interrupted = False

    def handle(_signal: int, _frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def table(rows: list[tuple[str, ...]], indent: str = "  ") -> str:
    """Rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(indent + line.rstrip() for line in lines)
