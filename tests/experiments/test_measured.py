"""Requests of a trace on a real engine."""

import functools
import itertools
from types import SimpleNamespace

import pytest

from rimuru_jax import Engine
from rimuru_jax.experiments import measured
from rimuru_jax.experiments.measured import serve
from rimuru_jax.experiments.results import Arrival
from tests.models.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    write_checkpoint(folder, "mixtral", seed=2, num_local_experts=8)
    return Engine(
        folder, dtype="float32", page_pool_bytes=1 << 20, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16
    )  # fmt: skip


def test_every_request_ends_and_the_timeline_adds_up(engine):
    arrivals = [Arrival(0.0, 8, 5), Arrival(0.0, 900, 1), Arrival(0.05, 6, 3)]
    result = serve(engine, arrivals)
    first, refused, second = result.requests
    assert "900" in refused.error and not first.error and not second.error
    assert (first.output_tokens, second.output_tokens) == (5, 3)
    for request in (first, second):
        assert len(request.itl) == request.output_tokens - 1
        assert 0 < request.ttft <= request.latency <= result.seconds
        assert request.ttft + sum(request.itl) == pytest.approx(request.latency)
    timeline = result.timeline
    assert timeline.seconds == sorted(timeline.seconds) and sum(timeline.tokens) == 8
    assert result.peak_running == 1
    pages = engine.plan.num_huge_pages - 1
    for column in zip(*timeline.pool_bytes.values(), strict=True):
        assert sum(column) == pages * engine.plan.layout.huge_page_bytes


def test_what_is_not_done_in_time_is_ended(engine, monkeypatch):
    clock = SimpleNamespace(perf_counter=functools.partial(next, itertools.count()))  # a second at every look
    monkeypatch.setattr(measured, "time", clock)
    result = serve(engine, [Arrival(0.0, 8, 50), Arrival(60.0, 8, 50)], until=20)
    assert 1 < result.requests[0].output_tokens < 20
    assert [request.latency for request in result.requests] == [0, 0]
    assert [request.error for request in result.requests] == [measured.NOT_DONE] * 2
    assert not engine.has_unfinished_requests()
    used = engine.allocator.ledger().kinds["kv"]
    assert used.used == 0


def test_none_that_can_be_served(engine):
    with pytest.raises(ValueError, match=r"no request could be served: .*900"):
        serve(engine, [Arrival(0.0, 900, 1)])
