"""SIGTERM and SIGINT as a wish: finish the step, save, stop."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While the context is open, the first SIGTERM or SIGINT sets `requested`; a second SIGINT interrupts at once.

    The loop looks at `requested` between steps (all ranks must agree before they act on it). Signals can only be caught
    in the main thread; elsewhere the context changes nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.received is not None

    def __enter__(self) -> StopSignal:
        for number in self.SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
