"""Compiled steps kept between runs: found again for the same program, and for no other."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from rimuru_jax import Engine, SamplingParams, compiled_steps, serving_loop
from rimuru_jax.compiled_steps import CompiledSteps, made_here
from rimuru_jax.models import stack
from tests.models.tiny_checkpoints import write_checkpoint


def double() -> jax.stages.Compiled:
    return jax.jit(lambda x: x + x, donate_argnums=0).lower(jnp.ones(4)).compile()


def test_a_program_is_found_again(tmp_path):
    cache = CompiledSteps(tmp_path / "steps", ("model", 3))
    assert cache.load("a") is None
    cache.save("a", double())
    given = jnp.arange(4.0)
    found = CompiledSteps(tmp_path / "steps", ("model", 3)).load("a")
    assert found is not None
    assert found(given).tolist() == [0, 2, 4, 6] and given.is_deleted()
    assert CompiledSteps(tmp_path / "steps", ("model", 4)).load("a") is None


@pytest.mark.parametrize("change", ["version", "source", "setting"])
def test_another_environment_is_another_program(change, tmp_path, monkeypatch):
    CompiledSteps(tmp_path, "model").save("a", double())
    if change == "version":
        monkeypatch.setattr(jax, "__version__", "9.9.9")
    elif change == "source":
        monkeypatch.setattr(compiled_steps, "_sources", lambda: "edited")
    else:
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert CompiledSteps(tmp_path, "model").load("a") is None


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"nothing"])
def test_a_damaged_file_is_no_program(damage: Callable[[bytes], bytes], tmp_path):
    cache = CompiledSteps(tmp_path, "model")
    cache.save("a", double())
    (file,) = tmp_path.glob("*/a")
    file.write_bytes(damage(file.read_bytes()))
    assert cache.load("a") is None


def test_the_longest_unused_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_steps, "MODELS_KEPT", 2)
    program = double()
    for name in "abc":
        CompiledSteps(tmp_path, name).save("step", program)
    kept = [CompiledSteps(tmp_path, name).load("step") is not None for name in "abc"]
    assert kept == [False, True, True]


def test_a_second_start_traces_no_step(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "model", "mixtral", seed=2)
    monkeypatch.setenv("RIMURU_CACHE", str(tmp_path / "cache"))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)

    def tokens_and_late() -> tuple[list[int], int]:
        engine = Engine(
            tmp_path / "model", dtype="float32", page_pool_bytes=1 << 20, compile_ahead=True,
            max_num_seqs=2, max_num_batched_tokens=16, max_model_len=48,
        )  # fmt: skip
        output = engine.generate([[5, 6, 7]], params, use_tqdm=False)[0]
        return list(output.outputs[0].token_ids), engine.loop.late_compilations

    first = tokens_and_late()

    class Untraceable:
        def lower(self, *_, **__):
            raise AssertionError("a step was traced")

    monkeypatch.setattr(serving_loop, "step", Untraceable())
    assert tokens_and_late() == first
    # What a mixer of one's own does, no file could tell.
    monkeypatch.setitem(stack.MIXERS, dataclasses.dataclass, lambda *_: None)
    with pytest.raises(AssertionError, match="a step was traced"):
        tokens_and_late()


def test_what_is_made_here():
    assert made_here(stack.MIXERS) and not made_here({int: double})
