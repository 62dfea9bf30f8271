"""Everything that must hold before a change lands: format, lint, types, tests. `python -m tests` runs it."""

import os
import subprocess
import sys

CHECKS = (("ruff", "format", "--check", "."), ("ruff", "check", "."), ("pyright",))
PYTEST = ("pytest", "-m", "not gpu", "-n", str(os.cpu_count() or 1), "--dist", "worksteal")

COMPILE_BOUND = (
    "tests/test_oracle.py",
    "tests/test_compiled_step.py",
    "tests/test_examples.py",
    "tests/test_hybrid_pool.py",
    "tests/models/test_hybrid.py",
)
"""Tests whose time is XLA's: without optimised code generation they take little more than half of it."""
QUICK_CODE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


def run(*command: str, xla_flags: str = "") -> None:
    """Run a module; the first that fails ends it all."""
    print("+", *command, flush=True)
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), xla_flags)))
    code = subprocess.run([sys.executable, "-m", *command], env={**os.environ, "XLA_FLAGS": flags}).returncode
    if code:
        sys.exit(code)


def main() -> None:
    for check in CHECKS:
        run(*check)
    run(*PYTEST, *COMPILE_BOUND, xla_flags=QUICK_CODE)
    run(*PYTEST, "tests", *(f"--ignore={path}" for path in COMPILE_BOUND))


if __name__ == "__main__":
    main()
