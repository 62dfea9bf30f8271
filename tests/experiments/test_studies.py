"""The studies on little data: each writes what it promises, and says what must be true of it."""

import importlib
import json
import re

import numpy as np
import pytest

from rimuru_jax.experiments import eol_sweep, hotset_transfer, samples, study, trace_replay
from rimuru_jax.experiments.results import Arrival
from rimuru_jax.experiments.simulator import matched_profile, popularity
from rimuru_jax.experiments.split_pool import SplitAllocator, even_split

GIB = 2**30
SHORT = Arrival(0.0, 64, 16)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a study as its command does; returns what it printed and the JSON it wrote."""

    def run(name: str, *arguments: str) -> tuple[str, dict]:
        monkeypatch.setattr("sys.argv", [name, *arguments, "--output", str(tmp_path)])
        monkeypatch.setattr(eol_sweep, "STEPS", (0, 0.3, 1))
        monkeypatch.setattr(
            hotset_transfer, "LOADS", {"one stream": [Arrival(0.0, 64, 64)], "8 streams": [SHORT] * 8}
        )
        importlib.import_module(f"rimuru_jax.experiments.{name}").main()
        pictures = list(tmp_path.glob("*.png"))
        assert pictures and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
        return capsys.readouterr().out, json.loads((tmp_path / f"{name}.json").read_text())

    return run


def olmoe(arrivals, device_gib: float = 9, **arguments) -> study.Case:
    model = study.find_model("OLMoE-1B-7B-0924")
    shares = popularity(model, 0.8)
    return study.Case(
        model=model, card=study.CARDS["h200"], device_bytes=int(device_gib * GIB), shares=shares,
        profile=matched_profile(model, shares), arrivals=arrivals,
        arguments={**study.LIMITS, "max_model_len": 2048, **arguments},
    )  # fmt: skip


def test_case_study(command):
    printed, written = command("case_study", "--requests", "2")
    assert printed.count("\n| ") == 6 and "| elastic, throughput: as far as it pays | 2 |" in printed
    assert len(written["runs"]) == 5
    assert all(run["counters"]["request_success"] == 2 for run in written["runs"].values())


def test_eol_sweep(command):
    """One stream wants as few experts away as can be, and gets them from every policy that moves."""
    printed, written = command("eol_sweep", "OLMoE-1B-7B-0924", "--device-gib", "9", "--requests", "12")
    assert printed.count("| elastic, throughput |") == 3
    tried, one = written["limits"], written["loads"]["1 stream"]
    rates = [one[f"fixed: {limit} away"]["output_throughput"] for limit in tried]
    assert rates == sorted(rates, reverse=True) and rates[0] > 2 * rates[-1]
    assert all(one[name]["output_throughput"] >= rates[0] for name in eol_sweep.ELASTIC)
    # With many streams, the fewer experts stay the more run at once.
    many = written["loads"]["12 at once"]
    at_once = [many[f"fixed: {limit} away"]["most_at_once"] for limit in tried]
    assert at_once == sorted(at_once) and at_once[0] < at_once[-1]


def test_trace_replay(command):
    printed, written = command("trace_replay", "Qwen1.5-MoE-A2.7B", "--device-gib", "16", "--requests", "50")
    assert printed.count("\n| ") == 5
    runs = written["runs"]
    mean, hindsight, watermark, throughput = runs.values()
    assert all(run["completed"] == 50 for run in runs.values())
    assert throughput["experts_given_up"] > 0 and throughput["experts_taken_back"] > 0  # law 18
    assert mean["experts_given_up"] == mean["experts_taken_back"] == 0
    cut = min(written["even_arrivals"].items(), key=lambda item: item[1]["mean_e2el_s"])[0]
    assert f"split, best for the mean: {cut} away" in runs
    assert hindsight["p99_ttft_s"] == min(run["p99_ttft_s"] for run in written["cuts"].values())
    assert watermark["most_at_once"] > mean["most_at_once"]


def test_ablation(command):
    printed, written = command("ablation", "Qwen3.5-35B-A3B", "--requests", "60", "--time-scale", "1")
    assert printed.count("| without kernel |") == 2
    whole, allocator, adjuster, kernel, prefetch = written["runs"].values()
    assert all(run["completed"] == 60 for run in written["runs"].values())
    assert kernel["mean_tpot_ms"] > whole["mean_tpot_ms"] and kernel["seconds"] > whole["seconds"]
    assert allocator["experts_given_up"] == adjuster["experts_given_up"] == 0 < whole["experts_given_up"]
    assert allocator["p99_ttft_s"] >= adjuster["p99_ttft_s"]
    assert prefetch["seconds"] != whole["seconds"]
    assert (
        written["one_stream"]["everything"]["mean_tpot_ms"]
        < written["one_stream"]["without kernel"]["mean_tpot_ms"]
    )


def test_hotset_transfer(command):
    printed, written = command("hotset_transfer", "--requests", "4")
    domains = written["requests_from"]
    fetched = np.array(written["figures"]["one stream, hotset: MiB fetched per token"])
    own = np.diag(fetched)
    assert len(domains) == 6 and fetched.shape == (7, 6)
    # Its own profile is the best for every text, by far for most, and none is as good as another's on average.
    assert (own <= fetched.min(axis=0) * 1.001).all()
    assert own.mean() < 0.6 * fetched[6].mean()
    # What is chosen corrects a profile that is wrong.
    corrected = np.array(written["figures"]["one stream, online: MiB fetched per token"])
    assert corrected[6].mean() < 0.95 * fetched[6].mean()
    assert printed.count("\n| ") == 9


def test_routing_is_what_was_counted():
    routing = hotset_transfer.routing_by_domain(study.find_model("OLMoE-1B-7B-0924"))
    for shares in routing.values():
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        assert (
            (shares[3] == shares[0]).all()
            and (shares[4] == shares[10]).all()
            and (shares[12] == shares[15]).all()
        )
    # A hot quarter covers about .43, .56 and .61 of its own text's routing in the three layers.
    hot = [
        np.mean([np.sort(shares[layer])[-16:].sum() for shares in routing.values()]) for layer in (0, 7, 15)
    ]
    np.testing.assert_allclose(hot, [0.43, 0.56, 0.61], atol=0.03)
    with pytest.raises(
        ValueError, match="the model has 128 experts in a layer, the counts are of OLMoE's 64"
    ):
        hotset_transfer.routing_by_domain(study.find_model("Qwen3-30B-A3B"))


def test_steady_arrivals_are_the_same_requests_without_the_bursts():
    arrivals = study.bursts(3000, 3.0)
    even = trace_replay.steady(arrivals)
    assert [(a.prompt_tokens, a.output_tokens) for a in even] == [
        (a.prompt_tokens, a.output_tokens) for a in arrivals
    ]

    def most_in_ten_seconds(requests: list[Arrival]) -> int:
        return int(np.histogram([a.seconds for a in requests], np.arange(0, 2400, 10))[0].max())

    assert len(arrivals) == 2834 and most_in_ten_seconds(arrivals) > 4 * most_in_ten_seconds(even)


def test_limits_go_from_what_fits_to_one_tokens_experts():
    case = olmoe([])
    tried = eol_sweep.limits(case)
    assert tried[-1] == 64 - 8 and tried == sorted(set(tried))
    assert not isinstance(case.run(memory_policy="fixed", expert_offload_limit=tried[0]), str)
    assert "too small" in str(case.run(memory_policy="fixed", expert_offload_limit=tried[0] - 1))


def test_regions_keep_to_themselves():
    """Of a pool cut by kind, no kind gets more than its share however much of the rest is free."""
    case = olmoe([Arrival(0.0, 100, 100)] * 20, memory_policy="fixed", expert_offload_limit=48)
    allocators = []

    def allocator(plan):
        units = {name: units // 8 for name, units in even_split(plan, 200).items()}
        allocators.append(SplitAllocator(plan, units))
        return allocators[-1]

    whole, cut = case.run(), case.run(allocator=allocator)
    assert not isinstance(whole, str) and not isinstance(cut, str)
    assert cut.counters["request_success"] == whole.counters["request_success"] == 20
    (made,) = allocators
    page = made.layout["kv"].stride_bytes
    assert (
        0
        < max(cut.timeline.pool_bytes["kv"])
        <= made.units["kv"] * page
        < max(whole.timeline.pool_bytes["kv"])
    )
    assert min(cut.timeline.pool_bytes["free"]) > 0 and cut.seconds > whole.seconds


def test_a_window_of_azures_trace():
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"] + [
        f"2023-11-16 18:{minute:02}:59.{fraction}00,{minute},{1 + minute}"
        for minute, fraction in ((58, "75000"), (59, "76000"), (59, "99600"))
    ]
    wanted = ["arrival_s,input_tokens,output_tokens", "0.000,59,60", "0.236,59,60"]
    assert list(samples.azure_window(lines, 60.005, 10)) == wanted
    with pytest.raises(ValueError, match="no request came from second 70 to 80"):
        list(samples.azure_window(lines, 70, 10))
    with pytest.raises(ValueError, match="wanted a CSV with TIMESTAMP"):
        list(samples.azure_window(["a", "1"], 0, 1))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("trace_replay", ["--time-scale", "0"], "--time-scale is 0, it must be above 0"),
        ("eol_sweep", ["--requests", "0"], "--requests is 0, it must be at least 1"),
        ("eol_sweep", ["--device-gib", "2"], "do not hold .* bytes of resident weights"),
        ("case_study", ["no/such/model"], "no/such/model"),
    ],
)
def test_errors_are_one_sentence(name, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"rimuru_jax.experiments.{name}").main()
    assert end.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, line), line
