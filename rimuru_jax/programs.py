"""Programs that are compiled before they are needed, or found compiled by an earlier run."""

import threading
from typing import Any

import jax

from rimuru_jax.compiled_steps import CompiledSteps


class Programs:
    """The programs of one engine by name, each compiled once: ahead by `compile`, or when it is first run.

    Args:
        kept: where they are kept between runs.
        options: of the compiler, for programs that are compiled ahead.
        shared: what was not compiled ahead is left to `jit`, which shares it with other engines of this process.

    Attributes:
        late: runs of programs that were not there although others had been compiled ahead.
    """

    def __init__(self, kept: CompiledSteps | None, options: dict[str, Any] | None, *, shared: bool):
        self._kept, self._options, self._shared = kept, options, shared
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._lowering = threading.Lock()
        self.late = 0

    def compile(self, name: str, function: Any, /, *args: Any, **static: Any) -> jax.stages.Compiled:
        """Find or compile a jitted function for arguments of these shapes. Thread-safe."""
        compiled = self._kept.load(name) if self._kept else None
        if compiled is None:
            with self._lowering:  # tracing gains nothing from threads
                lowered = function.lower(*args, **static)
            compiled = lowered.compile(self._options)
            if self._kept:
                self._kept.save(name, compiled)
        self._compiled[name] = compiled
        return compiled

    def __call__(self, name: str, function: Any, /, *args: Any, **static: Any) -> Any:
        """Run it. Whoever uses one name gives arguments of the same shapes, and the same static ones."""
        compiled = self._compiled.get(name)
        if compiled is None:
            self.late += bool(self._compiled)
            if self._shared:
                return function(*args, **static)
            compiled = self.compile(name, function, *args, **static)
        return compiled(*args)
