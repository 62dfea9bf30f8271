"""What `benchmarks/soak.py` calls growth, and the models that it shortens."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.soak import Memory, grown, with_layers
from rimuru_jax.models.registry import parse_config, read_config

BEFORE = Memory(host_mib=900.0, device_mib=100.0, arrays=20, objects=300_000)


@pytest.mark.parametrize(
    ("field", "fine", "too_much"),
    [
        ("host_mib", 931.0, 933.0),
        ("device_mib", 131.0, 133.0),
        ("arrays", 30, 40),
        ("objects", 310_000, 350_000),
    ],
)
def test_growth_is_named(field: str, fine: float, too_much: float) -> None:
    assert not grown(BEFORE, dataclasses.replace(BEFORE, **{field: fine}), 20_000, 32)
    (text,) = grown(BEFORE, dataclasses.replace(BEFORE, **{field: too_much}), 20_000, 32)
    assert f" by {too_much - getattr(BEFORE, field):g}" in text.replace(".0 MiB", " MiB")


@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Qwen3.5-35B-A3B"])
def test_a_model_is_shortened(model: str) -> None:
    config = Path("tests/data/configs") / f"{model}.json"
    with with_layers(config, 4) as shorter:
        assert len(parse_config(read_config(shorter)).layers) == 4
        changed = json.loads(shorter.read_text())
    assert changed.keys() == json.loads(config.read_text()).keys()
    assert len(parse_config(read_config(config)).layers) > 4
