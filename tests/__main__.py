"""Everything that must hold before a change lands: format, lint, types, documentation, tests. `python -m tests` runs it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

CHECKS = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("pyright",),
    ("mkdocs", "build", "--strict"),
)
PYTEST = ("pytest", "-m", "not gpu", "-n", str(os.cpu_count() or 1), "--dist", "worksteal")

COMPILE_BOUND = (
    "tests/test_oracle.py",
    "tests/test_compiled_step.py",
    "tests/test_docs.py",
    "tests/test_examples.py",
    "tests/test_hybrid_pool.py",
    "tests/server/test_reliability.py",
    "tests/test_structured_output.py",
    "tests/models/test_hybrid.py",
)
"""Tests whose time is XLA's: without optimised code generation they take little more than half of it."""
QUICK_CODE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


INTERPRETED = sorted(str(path) for path in Path("tests/pallas").glob("test_*_mosaic.py"))
"""Tests of GPU kernels, whose interpreter needs more of XLA's threads than there are cores (see `conftest`)."""

COMPILED = "tests/pallas/test_compiled_for_h200.py"
"""Compiles with the CUDA plugin of JAX, in the dependency group `h200`."""


def run(*command: str, **variables: str) -> None:
    """Run a module with more environment variables; the first that fails ends it all."""
    print("+", *command, flush=True)
    # With the CUDA plugin there, JAX would look for a GPU and report at length that there is none.
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1", **variables}
    code = subprocess.run([sys.executable, "-m", *command], env=variables).returncode
    if code:
        sys.exit(code)


def main() -> None:
    if not importlib.util.find_spec("jax_cuda13_plugin"):
        sys.exit(
            "the tests need the dependency group h200: uv run --group h200 --extra demo --extra server python -m tests"
        )
    for check in CHECKS:
        run(*check)
    cores = str(os.cpu_count() or 1)
    quick = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), QUICK_CODE)))
    run(*PYTEST, *COMPILE_BOUND, NPROC=cores, XLA_FLAGS=quick)
    apart = (*COMPILE_BOUND, *INTERPRETED, COMPILED)
    run(*PYTEST, "tests", *(f"--ignore={path}" for path in apart), NPROC=cores)
    run(*PYTEST, *INTERPRETED)
    run(*PYTEST, COMPILED, NPROC=cores)


if __name__ == "__main__":
    main()
