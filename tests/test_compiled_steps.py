"""Compiled steps kept between runs: found again for the same program, and for no other."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax import compiled_steps, models, pallas, serving_loop
from rimuru_jax.compiled_steps import CompiledSteps, made_here
from rimuru_jax.host.pool_plan import choose_layout
from rimuru_jax.models import stack
from rimuru_jax.models.checkpoint import load_checkpoint
from rimuru_jax.models.config import ElementBytes, LayerSpec, Moe
from rimuru_jax.models.context import ModelSpec
from rimuru_jax.models.hybrid import hybrid
from rimuru_jax.models.stack import stack_params
from rimuru_jax.serving_loop import Bucket, ServingLoop, empty_batch
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


class Killed(BaseException):
    """Stands for the process being killed: nothing in the package catches it."""


def test_what_a_killed_writer_leaves_is_no_program(tmp_path, monkeypatch):
    def die(*_: object) -> None:
        raise Killed

    cache = CompiledSteps(tmp_path, "model")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", die)
        cache.save("a", double())
    assert [path for path in tmp_path.rglob("*") if path.is_file()], "it was killed before it wrote"
    assert cache.load("a") is None
    cache.save("a", double())
    found = CompiledSteps(tmp_path, "model").load("a")
    assert found is not None and found(jnp.arange(4.0)).tolist() == [0, 2, 4, 6]


def test_the_longest_unused_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_steps, "MODELS_KEPT", 2)
    program = double()
    for name in "abc":
        CompiledSteps(tmp_path, name).save("step", program)
    kept = [CompiledSteps(tmp_path, name).load("step") is not None for name in "abc"]
    assert kept == [False, True, True]


class InMemory:
    """In place of files: XLA's CPU executables do not always survive them."""

    kept: ClassVar[dict[tuple[str, str], jax.stages.Compiled]] = {}

    def __init__(self, root: Path, what: Any):
        self.what = repr(what)

    def load(self, name: str) -> jax.stages.Compiled | None:
        return self.kept.get((self.what, name))

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        self.kept[self.what, name] = compiled


def test_a_second_start_traces_no_step(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, "mixtral", seed=2)
    monkeypatch.setattr(serving_loop, "CompiledSteps", InMemory)
    monkeypatch.setattr(InMemory, "kept", {})
    loaded = load_checkpoint(tmp_path, "float32")
    layout = choose_layout(lambda t: loaded.config.page_kinds(ElementBytes(weight=4, state=4), t))
    spec, bucket = ModelSpec.create(loaded.config, layout, "float32"), Bucket(1, 1, True)
    params = stack_params(loaded.config, loaded.params)

    def start(max_num_seqs: int = 2) -> None:
        limits = {"max_num_seqs": max_num_seqs, "max_model_len": 48, "num_huge_pages": 8}
        loop = ServingLoop(spec, params, loaded.host_pages, layout, cache=tmp_path, **limits)
        loop.warm_up([bucket], lambda fraction, text: None)
        assert loop.run((empty_batch(bucket), bucket)).logits.shape == (1, loaded.config.vocab_size)

    class Untraceable:
        def lower(self, *_, **__):
            raise AssertionError("a step was traced")

    start()
    monkeypatch.setattr(serving_loop, "step", Untraceable())
    start()
    with pytest.raises(AssertionError, match="a step was traced"):
        start(max_num_seqs=3)
    # What a mixer of one's own does, no file could tell.
    monkeypatch.setitem(stack.MIXERS, dataclasses.dataclass, lambda *_: None)
    with pytest.raises(AssertionError, match="a step was traced"):
        start()


@dataclasses.dataclass(frozen=True)
class Foreign:
    width: int = 3


def test_what_is_made_here():
    moe = Moe(num_experts=4, num_experts_per_tok=2, intermediate_size=32, normalize=True)
    config = hybrid(("gdn", "attn"), hidden_size=64, vocab_size=96, moe=moe)
    assert made_here(
        config, stack.EXTENSIONS, Moe, "silu", np.dtype("float32"), jnp.dtype(jnp.bfloat16), None
    )
    for foreign in (
        double,
        Foreign,
        Foreign(),
        lambda: 3,
        functools.partial(stack.forward),
        {"mine": double},
        {Foreign: stack.forward},
        (1, [double]),
        # Wherever in a model's config: a layer's kind, a function in place of a name.
        dataclasses.replace(config, layers=(*config.layers, LayerSpec(ffn=Foreign()))),  # type: ignore[arg-type]
        dataclasses.replace(
            config, layers=(LayerSpec(ffn=dataclasses.replace(moe, activation=jax.nn.relu)),)
        ),
    ):
        assert not made_here(foreign), foreign


def test_every_open_table_of_functions_is_asked():
    """One that someone adds to and that nobody asks would make a stale program pass for the new one."""
    tables = {}
    for part in (models, pallas):
        for info in pkgutil.walk_packages(part.__path__, f"{part.__name__}."):
            module = importlib.import_module(info.name)
            tables |= {
                id(value): f"{info.name}.{name}"
                for name, value in vars(module).items()
                if isinstance(value, dict)
                and value
                and all(map(callable, value.values()))
                and not name.startswith("__")
            }
    assert set(tables) == set(map(id, stack.EXTENSIONS)), tables


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    CompiledSteps(tmp_path, "model").save("a", double())
    assert "the compiled step a is not kept: no space left" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
