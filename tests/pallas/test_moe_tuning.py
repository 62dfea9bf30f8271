"""Sizes kept as data: which entry is taken, and that what is in the package can run."""

import dataclasses
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from benchmarks.tune_moe import launches
from rimuru_jax.pallas.memory_view import MemoryView
from rimuru_jax.pallas.paged_moe import api, mosaic_gpu, tuning
from rimuru_jax.pallas.paged_moe.tuning import ExpertShape

VIEW = MemoryView(kind="expert", page_shape=(768, 2048), dtype=jnp.dtype(jnp.bfloat16), stride=768 * 2048)
EXPERTS = ExpertShape(experts=128, f=768, d=2048, matrices=3)


@pytest.fixture
def card(tmp_path, monkeypatch) -> Iterator[None]:
    """This device has data for up to 64 and up to 512 pairs of Qwen3-30B-A3B's experts."""
    device = jax.devices()[0].device_kind

    def sizes(up_to: int, tile: int) -> dict:
        config = mosaic_gpu.choose_config(tile, 768, 2048, 132)
        down = dataclasses.replace(config.down, stages=3)
        return {
            "up_to": up_to,
            "tile": tile,
            "gate_up": dataclasses.asdict(config.gate_up),
            "down": dataclasses.asdict(down),
        }

    content = {"entries": [{"shape": dataclasses.asdict(EXPERTS), "sizes": [sizes(64, 16), sizes(512, 32)]}]}
    (tmp_path / tuning.file_name(device)).write_text(json.dumps(content))
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(api, "resolve", lambda *_, **__: "mosaic_gpu")
    tuning._entries.cache_clear()
    yield
    tuning._entries.cache_clear()


def test_the_first_entry_that_is_large_enough_is_taken(card):
    tiles = [api.token_tile(pairs, 128, VIEW, 3) for pairs in (1, 64, 65, 512)]
    assert tiles == [16, 16, 32, 32]
    taken = mosaic_gpu.config_for(32, 500, EXPERTS, 132)
    usual = mosaic_gpu.choose_config(32, 768, 2048, 132)
    assert taken == dataclasses.replace(usual, down=dataclasses.replace(usual.down, stages=3))


def test_what_was_not_measured_has_the_usual_sizes(card):
    assert api.token_tile(513, 128, VIEW, 3) == mosaic_gpu.token_tile(513, 128)
    assert api.token_tile(64, 64, VIEW, 3) == mosaic_gpu.token_tile(64, 64)
    usual = mosaic_gpu.choose_config(8, 768, 2048, 132)
    assert mosaic_gpu.config_for(8, 500, EXPERTS, 132) == usual, "tokens were grouped for another tile"


def can_run(tile: int, matrices: int, width: int, launch: mosaic_gpu.Launch) -> None:
    slot = (matrices * launch.block + tile) * launch.depth * 2
    assert width % launch.block == 0
    assert launch.stages * slot + tile * min(launch.block, 128) * 2 < 227 * 1024


@pytest.mark.parametrize("tile", mosaic_gpu.TILES)
def test_what_is_tried_can_run(tile):
    for matrices, width, contracted in ((2, 768, 2048), (1, 2048, 768), (2, 1408, 2048)):
        tried = list(launches(tile, matrices, width, contracted))
        assert tried
        for launch in tried:
            assert contracted % launch.depth == 0
            can_run(tile, matrices, width, launch)


def test_the_sizes_of_the_package_can_run():
    for path in tuning.FOLDER.glob("*.json"):
        for entry in json.loads(path.read_text())["entries"]:
            experts = ExpertShape(**entry["shape"])
            last = 0
            for sizes in entry["sizes"]:
                assert sizes["up_to"] > last and sizes["tile"] in mosaic_gpu.TILES
                last = sizes["up_to"]
                gate_up, down = (mosaic_gpu.Launch(**sizes[name]) for name in ("gate_up", "down"))
                can_run(sizes["tile"], experts.matrices - 1, experts.f, gate_up)
                can_run(sizes["tile"], 1, experts.d, down)
