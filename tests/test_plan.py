"""Page kinds and pools planned from published config.json files, against sizes worked out by hand."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rimuru_jax.cli import main
from rimuru_jax.config import EngineConfig
from rimuru_jax.controller import plan_for
from rimuru_jax.host.page_layout import PageLayout
from rimuru_jax.models.config import ElementBytes
from rimuru_jax.models.registry import parse_config

CONFIGS = Path(__file__).parent / "data" / "configs"
KIB, MIB, GIB = 2**10, 2**20, 2**30


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def layout(name: str, ssm_bytes: int = 4) -> PageLayout:
    return PageLayout.plan(parse_config(config(name)).page_kinds(ElementBytes(recurrent=ssm_bytes), 16))


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status = main(["plan", *arguments, "--json"])
    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    return json.loads(output.out)


def refusal(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> str:
    status = main(["plan", str(path), *arguments])
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    assert output.err.startswith("rimuru: error: ") and output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    ("name", "expert", "kv", "state", "conv", "huge", "huge_bf16"),
    [
        ("Qwen1.5-MoE-A2.7B", 5.5 * MIB, 128 * KIB, 0, 0, 5.5 * MIB, 5.5 * MIB),
        ("Qwen3-30B-A3B", 3 * MIB, 32 * KIB, 0, 0, 3 * MIB, 3 * MIB),
        ("Qwen3.5-35B-A3B", 2 * MIB, 32 * KIB, 2 * MIB, 16 * KIB, 2 * MIB, 2 * MIB),
        ("Qwen3.5-122B-A10B", 6 * MIB, 32 * KIB, 4 * MIB, 24 * KIB, 12 * MIB, 6 * MIB),
        ("Granite-4.0-H-Small", 6 * MIB, 64 * KIB, 4 * MIB, 16.5 * KIB, 12 * MIB, 6 * MIB),
        ("Nemotron-3-Nano-30B-A3B", 1856 * 2688 * 2, 16 * KIB, 2 * MIB, 12 * KIB, *[1856 * 2688 * 2] * 2),
    ],
)
def test_published_page_sizes(name, expert, kv, state, conv, huge, huge_bf16):
    placed = layout(name)
    sizes = {p.kind.name: p.kind.page_bytes for p in placed.kinds}
    assert sizes == {"expert": expert, "kv": kv} | ({"ssm": state, "conv": conv} if state else {})
    assert placed.huge_page_bytes == huge
    assert layout(name, ssm_bytes=2).huge_page_bytes == huge_bf16


def test_nemotron_pads_its_states():
    placed = layout("Nemotron-3-Nano-30B-A3B")
    ssm = placed["ssm"]
    # Four to an expert page, and a whole number of float32 rows of 128.
    assert (ssm.stride_bytes, ssm.kind.row_bytes) == (4872 * 128 * 4, 512)
    assert (placed.pages_per_huge("ssm"), placed.pages_per_huge("expert")) == (4, 1)


@pytest.mark.parametrize(
    ("name", "experts", "kv_per_token", "state", "conv"),
    [
        ("Qwen1.5-MoE-A2.7B", 4320 * 5.5 * MIB, 192 * KIB, 0, 0),
        ("Qwen3-30B-A3B", 54 * GIB, 96 * KIB, 0, 0),
        ("Qwen3.5-35B-A3B", 60 * GIB, 20 * KIB, 60 * MIB, 30 * 3 * 16 * KIB),
        ("Qwen3.5-122B-A10B", 216 * GIB, 24 * KIB, 144 * MIB, 36 * 3 * 24 * KIB),
        ("Granite-4.0-H-Small", 8640 * 6 * MIB, 16 * KIB, 144 * MIB, 36 * 3 * 16.5 * KIB),
        ("Nemotron-3-Nano-30B-A3B", 5888 * 1856 * 2688 * 2, 6 * KIB, 23 * 4872 * 512, 23 * 3 * 12 * KIB),
    ],
)
def test_published_byte_classes(name, experts, kv_per_token, state, conv, capsys):
    classes = plan(capsys, str(CONFIGS / f"{name}.json"))["bytes"]
    assert classes["experts"] == experts
    assert classes["kv_per_token"] == kv_per_token
    assert classes["state_per_sequence"] == state + conv
    assert classes["shortest_sequence"] == state + conv + 16 * kv_per_token


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # As the model cards round them.
        ("Qwen1.5-MoE-A2.7B", 14.3),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3.5-35B-A3B", 35),
        ("Granite-4.0-H-Small", 32),
        ("Nemotron-3-Nano-30B-A3B", 31.6),
    ],
)
def test_resident_weights_complete_the_published_number_of_parameters(name, billions, capsys):
    classes = plan(capsys, str(CONFIGS / f"{name}.json"))["bytes"]
    assert (classes["resident_weights"] + classes["experts"]) / 2e9 == pytest.approx(billions, rel=0.01)


def test_fields_in_other_words_mean_the_same():
    def described(raw: dict[str, Any]) -> Any:
        return dataclasses.replace(parse_config(raw), model_type="")

    qwen = config("Qwen3.5-35B-A3B")
    text = qwen["text_config"]
    without_types = {k: v for k, v in text.items() if k != "layer_types"}
    assert described(qwen) == described(text) == described(without_types)

    granite = config("Granite-4.0-H-Small")
    words = {"mamba": "linear_attention", "attention": "full_attention"}
    types = [words[kind] for kind in granite["layer_types"]]
    assert described(granite) == described(granite | {"layer_types": types})

    nemotron = config("Nemotron-3-Nano-30B-A3B")
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    types = [words[kind] for kind in nemotron["hybrid_override_pattern"]]
    assert described(nemotron) == described(
        nemotron | {"hybrid_override_pattern": None, "layers_block_type": types}
    )


def test_pool_of_qwen3_30b_by_hand(capsys):
    """27 GiB are 9216 pages of 3 MiB, one of them scratch; the 48 layers of a KV page share 48 * 32 KiB, half a page."""
    path = str(CONFIGS / "Qwen3-30B-A3B.json")
    options = ("--page-pool-bytes", "27GiB", "--memory-policy", "elastic", "--expert-offload-limit", "96")
    content = plan(capsys, path, *options, "--loading-buffer-experts", "32")
    [row] = content["pools"]
    floor, buffers = 32 * 48 * 3, 2 * 32 * 3
    assert row["pool_bytes"] == 9216 * 3 * MIB
    assert row["floor_bytes"] == floor * 3 * MIB
    assert row["loading_buffer_bytes"] == buffers * 3 * MIB
    assert row["expert_offload_limit"] == 96
    assert row["max_model_len"] == 40960
    assert row["pages"] == {"expert": 9215, "kv": 9215 * 2}
    free = 9215 - floor - buffers
    assert row["concurrency"] == {
        "512": {"all_experts": 0, "floor": free // 16},
        "2048": {"all_experts": 0, "floor": free // 64},
        "40960": {"all_experts": 0, "floor": free // 1280},
    }


def test_start_is_where_the_engine_stops_filling(capsys):
    """Elastic keeps 11 pages free, fixed fills the floor alone, static everything."""
    path = str(CONFIGS / "Qwen3-30B-A3B.json")
    rows = plan(capsys, path, "--page-pool-bytes", "60GiB", "--loading-buffer-experts", "0")["pools"]
    start = {row["memory_policy"]: row["resident_experts_at_start"] for row in rows}
    assert start == {"static": 6144, "fixed": 6144, "elastic": 6144}
    path, limit = str(CONFIGS / "Qwen3-30B-A3B.json"), ("--expert-offload-limit", "96")
    rows = plan(capsys, path, "--page-pool-bytes", "27GiB", "--loading-buffer-experts", "0", *limit)["pools"]
    start = {row["memory_policy"]: row.get("resident_experts_at_start") for row in rows}
    assert start == {"static": None, "fixed": 32 * 48, "elastic": (9215 - 11) // 3}


def test_without_a_size_several_pools_are_shown(capsys):
    content = plan(capsys, str(CONFIGS / "Granite-4.0-H-Small.json"))
    sizes = sorted({row["pool_bytes"] for row in content["pools"]})
    experts = content["bytes"]["experts"]
    step = 12 * MIB * content["layout"]["huge_page_multiple"]
    assert [pytest.approx(share * experts, abs=step) for share in (0.25, 0.5, 1, 1.25)] == sizes
    policies = [(row["pool_bytes"], row["memory_policy"]) for row in content["pools"]]
    assert len(policies) == len(set(policies)) == 12
    assert {row["memory_policy"] for row in content["pools"] if "error" in row} == {"static"}


def test_text_says_what_matters(capsys):
    assert main(["plan", str(CONFIGS / "Nemotron-3-Nano-30B-A3B.json")]) == 0
    text = capsys.readouterr().out
    assert "9.516 MiB" in text and "padded: the least common multiple would be 1.189 GiB" in text
    assert "static not within" in text and "page_pool_bytes must be at least" in text


def test_refusals(capsys, tmp_path):
    path = tmp_path / "config.json"

    def refused(content: str) -> str:
        path.write_text(content)
        return refusal(capsys, path)

    unknown = refused('{"model_type": "llama"}')
    for known in ("'llama'", "mixtral", "qwen3_5_moe", "granitemoehybrid", "nemotron_h"):
        assert known in unknown
    assert "no layer with routed experts" in refused(
        json.dumps(config("Granite-4.0-H-Small") | {"num_local_experts": 0})
    )
    nemotron = config("Nemotron-3-Nano-30B-A3B")
    assert "no layer with routed experts" in refused(
        json.dumps(nemotron | {"hybrid_override_pattern": "M-*-", "num_hidden_layers": 4})
    )
    assert "4 layers, but num_hidden_layers is 52" in refused(
        json.dumps(nemotron | {"hybrid_override_pattern": "ME*E"})
    )
    assert "'X' are not supported" in refused(
        json.dumps(nemotron | {"hybrid_override_pattern": "X", "num_hidden_layers": 1})
    )
    assert "ssm_state_size is missing" in refused(json.dumps(nemotron | {"ssm_state_size": None}))
    assert "cannot be read as JSON" in refused("{")
    assert "JSON object is needed" in refused("[]")
    assert "no config.json" in refusal(capsys, tmp_path / "nowhere")
    qwen = CONFIGS / "Qwen3-30B-A3B.json"
    assert "must be at least" in refusal(
        capsys, qwen, "--page-pool-bytes", "1MiB", "--memory-policy", "fixed"
    )
    assert "page-pool-bytes" in refusal(capsys, qwen, "--page-pool-bytes", "12 parsecs")
    assert "expert-offload-limit" in refusal(capsys, qwen, "--expert-offload-limit", "some")


def test_help_and_plan_do_not_wait_for_jax():
    code = (
        "import sys; from rimuru_jax.cli import main\n"
        f"status = main(['--help']) or main(['plan', {str(CONFIGS / 'Qwen3-30B-A3B.json')!r}])\n"
        "sys.exit(status or 'jax' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
    )


def test_the_report_at_start_up():
    """Worked out by hand: 27.5 GiB hold 9,386 huge pages of 3 MiB, one of them scratch, each an expert page or 2 of keys."""
    arguments = EngineConfig(page_pool_bytes=int(27.5 * GIB), max_model_len=8192, expert_offload_limit=100)
    text = plan_for(parse_config(config("Qwen3-30B-A3B")), arguments).describe()
    assert "9385 expert, 18770 kv" in text and "page_pool_bytes" in text
    assert "up to 100 of a layer may be away" in text and "expert_offload_limit" in text
    # 8,192 tokens are 512 pages of keys or 256 huge pages; 28 experts of 48 layers and 64 in buffers leave 5,161 of them.
    assert "0 beside all experts, 20 beside the fewest" in text
