"""How late the next step may begin, so that requests which come while the device is busy are in it.

    at once    | plan 3, run 3 |       wait for 2       | plan 4, run 4 |       wait for 3 ...
                                   a request that comes here is in step 4

    late       |    nothing    | plan 3, run 3 | wait for 2 |    nothing    | plan 4, run 4 | wait for 3 ...
                 a request that comes here is in step 3

A step that begins at once only waits for the device, and what comes meanwhile waits for the step after it. Until a late
one begins, whoever shares the interpreter with the engine's thread has it to himself.
"""

import time
from collections import deque
from collections.abc import Callable

MARGIN = 0.003
"""Seconds that a step begins before it would be too late, for all that differs from step to step."""
_STEPS = 16
"""Of so many the one that had the least time to spare decides."""
_LOOK = 0.0005
"""Seconds between two looks at the device."""


class LateStart:
    """Learns from steps how much time they have to spare. `seconds`: how long the next one can wait."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spare: deque[float] = deque(maxlen=_STEPS)
        self._held = 0.0

    def hold(self, busy: Callable[[], bool]) -> float:
        """Wait for as long as the next step can, or until the device is no longer `busy`; returns how long that was."""
        begin = now = time.monotonic()
        end = begin + self.seconds
        while now < end and busy():
            time.sleep(min(_LOOK, end - now))
            now = time.monotonic()
        self._held = now - begin
        return self._held

    def observe(self, waited: float | None) -> None:
        """How long the step after the last `hold` waited for the device; 0.0: it was too late; None: no step was before it."""
        if waited is not None:
            self._spare.append(self._held + waited if waited else self._held / 2)
        enough = len(self._spare) == _STEPS
        self.seconds = max(0.0, min(self._spare) - MARGIN) if enough else 0.0
        self._held = 0.0
