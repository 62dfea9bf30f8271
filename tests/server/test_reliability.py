"""Short versions of `benchmarks/reliability.py`: what clients should not do, and do."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import reliability
from benchmarks.reliability import Server
from rimuru_jax import Engine
from tests.server.running import running


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("reliability")
    # Few shapes to compile, and a pool that four long requests do not fit into.
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_pool_bytes": 144 << 10}
    return reliability.build_engine(folder, **small)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with running(engine, **reliability.server_settings()) as url:
        yield Server(url, os.getpid())


@pytest.fixture(autouse=True)
def ledger(engine: Engine) -> Iterator[None]:
    yield
    engine.allocator.check_ledger()


def test_malformed_bytes(server):
    assert reliability.malformed(server, 30)["statuses"]["400"] > 10


def test_dropped_connections(server):
    assert len(reliability.dropped(server, 100)["kinds"]) == 6


def test_slow_readers(server):
    reliability.slow_readers(server, 4, 1.0)


def test_flood(server):
    statuses = reliability.flood(server, 150)["statuses"]
    assert statuses[429] > 0


def test_random_load(server):
    figures = reliability.random_load(server, 40, kinds=6)
    assert {"length", "left", "abort"} <= set(figures["reasons"]) and figures["preemptions"] > 0


def test_generated_requests(server):
    # The last: it compiles many samplers, which are forgotten, with all else, before the next test.
    figures = reliability.generated(server, 120)
    assert figures["requests"] >= 100 and figures["statuses"]["2xx"] > 10 and figures["statuses"]["4xx"] > 10
