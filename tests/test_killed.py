"""An engine's process that is killed while it writes a cache: the next start finds half a file, and serves all the same."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from rimuru_jax import Engine, SamplingParams
from tests.models.tiny_checkpoints import write_checkpoint

PROGRAM = """
import os, signal, sys
import jax
from jax._src.lru_cache import LRUCache
from rimuru_jax import Engine, SamplingParams

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def put(self, key, value):  # as the original does, but for the end
    (self.path / f"{key}-cache").write_bytes(value[: len(value) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "killed":
    original, LRUCache.put = LRUCache.put, lambda self, key, value: (
        put if key.startswith("jit_step") else original
    )(self, key, value)
engine = Engine(sys.argv[1], dtype="float32", max_num_seqs=2, max_model_len=32, max_num_batched_tokens=8)
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
outputs = engine.generate([[1, 2, 3], [4, 5, 6, 7]], params, use_tqdm=False)
print([output.outputs[0].token_ids for output in outputs])
"""


def test_half_a_kept_program_does_not_stop_the_next_start(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "mixtral", seed=3)

    def start(end: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), end]
        environment = {**os.environ, "RIMURU_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        return subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=120
        )

    killed = start("killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    half = {path: path.stat().st_size for path in (tmp_path / "cache").rglob("jit_step*-cache")}
    assert half, "nothing was being written"
    again = start("served")
    assert again.returncode == 0, again.stderr
    assert "Error reading persistent compilation cache" in again.stderr  # it was found, and is no program

    engine = Engine(
        tmp_path / "model", dtype="float32", max_num_seqs=2, max_model_len=32, max_num_batched_tokens=8
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = engine.generate([[1, 2, 3], [4, 5, 6, 7]], params, use_tqdm=False)
    assert again.stdout.strip() == str([output.outputs[0].token_ids for output in outputs])
