import pytest

from rimuru_jax.host.metrics import COUNTERS, GAUGES, Metrics


def test_counters_add_and_gauges_replace():
    metrics = Metrics()
    metrics.add("num_preemptions")
    metrics.add("generation_tokens", 7)
    metrics.add("generation_tokens", 5)
    metrics.set("num_requests_running", 3)
    metrics.set("num_requests_running", 2)
    snapshot = metrics.snapshot()
    assert snapshot["num_preemptions"] == 1
    assert snapshot["generation_tokens"] == 12
    assert snapshot["num_requests_running"] == 2
    assert set(snapshot) == {*COUNTERS, *GAUGES}


def test_snapshot_is_a_copy():
    metrics = Metrics()
    before = metrics.snapshot()
    metrics.add("expert_shrinks", 4)
    assert before["expert_shrinks"] == 0


def test_unknown_names_are_errors():
    metrics = Metrics()
    with pytest.raises(KeyError, match="expert_shrink"):
        metrics.add("expert_shrink")
    with pytest.raises(KeyError, match="num_requests"):
        metrics.set("num_requests", 1)


def test_event_log_is_bounded_and_filtered():
    metrics = Metrics(max_events=3)
    for step, name in enumerate(["admitted", "shrink", "admitted", "expand"]):
        metrics.event(step, name, experts=step)
    assert [(event.step, event.name) for event in metrics.events()] == [
        (1, "shrink"),
        (2, "admitted"),
        (3, "expand"),
    ]
    assert [event.fields for event in metrics.events("shrink", "expand")] == [{"experts": 1}, {"experts": 3}]


def test_two_engines_share_nothing():
    one, other = Metrics(), Metrics()
    one.add("num_preemptions")
    one.event(1, "preempted")
    assert other.snapshot()["num_preemptions"] == 0
    assert not list(other.events())
