"""Simulated engines: every token is accounted for, and policies differ as they must."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from rimuru_jax.cli import main
from rimuru_jax.config import EngineConfig
from rimuru_jax.experiments.cards import CARDS
from rimuru_jax.experiments.results import Arrival
from rimuru_jax.experiments.simulator import Simulation, matched_profile, popularity
from rimuru_jax.models.registry import parse_config

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "Qwen1.5-MoE-A2.7B.json"
MODEL = parse_config(json.loads(CONFIG.read_text()))
GIB = 2**30
ALL_EXPERTS = 24 * 60 * 3 * 2 * 2048 * 1408
ARRIVALS = [Arrival(0.0, 300, 200)] * 24


def run(policy: str, pool_bytes: int, arrivals=ARRIVALS, card: str = "h200", **config):
    settings = EngineConfig(
        memory_policy=policy,  # type: ignore[arg-type]
        page_pool_bytes=pool_bytes,
        max_model_len=1024,
        max_num_seqs=64,
        **config,
    )
    shares = popularity(MODEL, 0.0)
    simulation = Simulation(MODEL, settings, CARDS[card], shares, matched_profile(MODEL, shares))
    return simulation, simulation.run(arrivals)


ONE = 32 * 24 * 2 * 16 * 16 * 128 * 2  # bytes of keys and values of a request of 500 tokens, in pages of 16
FITS = ALL_EXPERTS + 8 * ONE


@pytest.mark.parametrize("policy", ["static", "elastic"])
def test_every_token_is_delivered_in_order(policy):
    simulation, result = run(policy, FITS)
    assert [r.output_tokens for r in result.requests] == [200] * 24
    for request in result.requests:
        assert len(request.itl) == 199
        assert request.latency == pytest.approx(request.ttft + sum(request.itl))
    timeline = result.timeline
    assert (np.diff(timeline.seconds) > 0).all()
    used = np.sum([timeline.pool_bytes[kind] for kind in timeline.pool_bytes], axis=0)
    assert (used == (simulation.plan.num_huge_pages - 1) * simulation.plan.layout.huge_page_bytes).all()
    assert result.counters["request_success"] == 24


def test_static_runs_as_many_as_fit():
    simulation, result = run("static", FITS)
    least = simulation.plan.concurrency(500, resident_experts=60)
    assert least <= result.peak_running <= 2 * least  # some are young while others are at their full length
    assert set(result.timeline.resident_experts) == {24 * 60}


def test_more_requests_at_once_are_not_more_tokens_per_second():
    """Where all experts fit: the published rule runs most requests, and loses; the one that counts does not."""
    static = run("static", FITS)[1]
    watermark = run("elastic", FITS, adjuster_policy="watermark")[1]
    throughput = run("elastic", FITS, adjuster_policy="throughput")[1]
    assert watermark.peak_running > static.peak_running and watermark.steps < static.steps
    assert watermark.seconds > 1.5 * static.seconds
    assert throughput.seconds <= 1.02 * static.seconds


def test_where_they_do_not_fit_every_policy_fetches_and_room_wins():
    half = ALL_EXPERTS // 2 + 2 * ONE
    elastic = run("elastic", half, adjuster_policy="throughput")[1]
    narrow = run("fixed", half)[1]
    wide = [run("fixed", half, expert_offload_limit=limit)[1].seconds for limit in (40, 50)]
    assert narrow.seconds > 1.2 * elastic.seconds
    assert elastic.seconds <= 1.05 * min(wide)


def test_idle_time_passes_until_the_next_arrival():
    _, result = run("static", FITS, [Arrival(0.0, 10, 2), Arrival(5.0, 10, 2), Arrival(5.0, 2000, 2)])
    assert result.requests[1].start == 5.0 and result.requests[1].ttft < 1
    assert "1024" in result.requests[2].error and result.requests[2].output_tokens == 0


def test_a_pool_is_needed():
    shares = popularity(MODEL, 0.0)
    with pytest.raises(ValueError, match="needs page_pool_bytes"):
        Simulation(MODEL, EngineConfig(), CARDS["h200"], shares)


def test_command(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,20\n1.5,50,30\n")
    saved = tmp_path / "result.json"
    arguments = ["simulate", str(CONFIG), "--card", "rtx-5090", "--dataset-name", "trace"]
    assert main([*arguments, "--dataset-path", str(trace), "--save-result", str(saved)]) == 0
    figures = json.loads(saved.read_text())
    assert figures["completed"] == 2 and figures["total_output_tokens"] == 50
    assert figures["card"] == dataclasses.asdict(CARDS["rtx-5090"])
    assert len(figures["timeline"]["seconds"]) == figures["steps"]
    assert "Generated tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "abacus"], "--card is 'abacus', it must be one of h200"),
        (["--device-memory", "2GiB"], "do not hold .* bytes of resident weights"),
        (["--dataset-name", "trace"], "--dataset-name trace needs a --dataset-path"),
        (["--num-prompts", "0"], "must be positive"),
        (["--request-rate", "-1"], "--request-rate and --burstiness must be positive"),
        (["--max-model-len", "512"], "no request could be served: the prompt of request '0' has 1024 tokens"),
    ],
)
def test_errors_are_one_sentence(arguments, message, capsys):
    assert main(["simulate", str(CONFIG), *arguments]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("rimuru: error: ") and re.search(message, line)
