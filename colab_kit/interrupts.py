"""The stop button (SIGINT): what an interrupt waits for, and why a second press does not tear the clean-up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def uninterrupted(notice: str = "") -> Iterator[None]:
    """An interrupt that comes inside takes effect at the end of the block (or is dropped, if the block fails).

    `notice` is printed when one comes. Sections nest. Outside the main thread there are no interrupts.
    """
    pending = []

    def note(*_) -> None:
        if notice and not pending:
            print(notice)
        pending.append(True)

    previous = _replace_handler(note)
    if previous is None:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        previous(signal.SIGINT, None)


class OneInterrupt:
    """While entered, the first press interrupts and later ones do nothing, so that what the first one set off (an
    engine to empty, a checkpoint, the last picture) is finished. `again()` arms it again."""

    def __enter__(self) -> OneInterrupt:
        self.again()
        self._previous = _replace_handler(self._press)
        return self

    def __exit__(self, *_) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def again(self) -> None:
        self._pressed = False

    def _press(self, *_) -> None:
        if not self._pressed:
            self._pressed = True
            raise KeyboardInterrupt


def _replace_handler(handler: Callable) -> Callable | None:
    """Sets SIGINT's handler and returns the one before; None where there is none to replace."""
    if threading.current_thread() is not threading.main_thread():
        return None
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, or handled by other than Python
        return None
    signal.signal(signal.SIGINT, handler)
    return previous
