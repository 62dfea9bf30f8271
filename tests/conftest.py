"""Settings of every test: the same random cases on every run, no clock in the verdict, and no silent conversions."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")

# The GPU interpreter runs a thread per warpgroup, and each blocks one of XLA's threads, of which there are as many as
# cores: a kernel of three warpgroups would wait for ever on two cores. Read when JAX first uses the CPU.
os.environ.setdefault("NPROC", "8")

# An implicit promotion or an implicit broadcast of ranks is an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Shapes and dtypes that annotations state are checked at every call of the code that runs on a device.
# (`models.stack` is left out: its batch is also built of numpy arrays and of bare shapes, which annotations do not say.)
if importlib.util.find_spec("beartype"):  # a machine that only runs the GPU tests may lack it
    install_import_hook(["rimuru_jax.pallas", "rimuru_jax.models.layers"], "beartype.beartype")

MAX_MEMORY_MAPS = 20_000
"""Linux gives a process 65,530, and on a CPU each compiled executable takes a few hundred."""


@pytest.fixture(autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forget compiled executables between tests before the process runs out of memory maps, which would kill it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()
