import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rimuru_jax.host.hotset import HotsetProfile, ModelFingerprint

MODEL = ModelFingerprint(model_type="qwen3_moe", num_layers=2, num_experts=4, experts_per_token=2)


def _profile() -> HotsetProfile:
    first = np.array([[3, 0, 5, 0], [0, 0, 0, 0]])
    second = np.array([[1, 0, 0, 1], [2, 2, 2, 2]])
    return dataclasses.replace(HotsetProfile.uniform(MODEL), data="chat").record(first, 4).record(second, 4)


def test_record_adds_counts_and_leaves_the_original_alone():
    empty = HotsetProfile.uniform(MODEL)
    profile = empty.record(np.ones((2, 4), np.int32), 4)
    assert profile.tokens == 4 and profile.counts.dtype == np.int64
    assert (profile.counts == 1).all()
    assert (empty.counts == 0).all() and empty.tokens == 0


def test_probabilities_and_order():
    profile = _profile()
    assert profile.counts.tolist() == [[4, 0, 5, 1], [2, 2, 2, 2]]
    np.testing.assert_allclose(profile.probabilities(), [[0.4, 0, 0.5, 0.1], [0.25] * 4])
    assert profile.order().tolist() == [[2, 0, 3, 1], [0, 1, 2, 3]]


def test_uniform_profile_is_flat_and_ordered_by_id():
    profile = HotsetProfile.uniform(MODEL)
    np.testing.assert_allclose(profile.probabilities(), np.full((2, 4), 0.25))
    assert profile.order().tolist() == [[0, 1, 2, 3]] * 2


def test_round_trip(tmp_path: Path):
    path = tmp_path / "hotset.json"
    _profile().save(path)
    loaded = HotsetProfile.load(path, MODEL)
    assert loaded.model == MODEL and loaded.tokens == 8 and loaded.data == "chat"
    assert loaded.counts.dtype == np.int64
    np.testing.assert_array_equal(loaded.counts, _profile().counts)


def test_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(4, 2\).*\(2, 4\)"):
        HotsetProfile(model=MODEL, counts=np.zeros((4, 2), np.int64), tokens=0, data="")


def test_other_model_is_refused_with_both_names(tmp_path: Path):
    path = tmp_path / "hotset.json"
    _profile().save(path)
    other = dataclasses.replace(MODEL, model_type="olmoe", num_experts=8)
    with pytest.raises(ValueError, match=r"qwen3_moe with 2 MoE layers of 4 .* olmoe with 2 MoE layers of 8"):
        HotsetProfile.load(path, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[1, 2]", '"format"'),
        ('{"format": "rimuru-hotset-2"}', "rimuru-hotset-1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "hotset.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        HotsetProfile.load(path, MODEL)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("counts", None, '"counts" must be list'),
        ("counts", [[1, 2, 3, 4], [1, 2]], "different lengths"),
        ("counts", [[1, 2, 3, 4]], r"shape \(1, 4\)"),
        ("counts", [[1, 2, 3, 4], [1, 2, "3", 4]], "lists of integers"),
        ("counts", [[1, 2, 3, 4], [1, 2, -3, 4]], "negative"),
        ("tokens", "8", '"tokens" must be int'),
        ("num_layers", True, '"num_layers" must be int'),
        ("model_type", 3, '"model_type" must be str'),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, field: str, value: object, message: str):
    path = tmp_path / "hotset.json"
    _profile().save(path)
    content = json.loads(path.read_text())
    content[field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"damaged.*{message}"):
        HotsetProfile.load(path, MODEL)


def test_text_that_is_not_unicode_is_refused(tmp_path: Path):
    path = tmp_path / "hotset.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not JSON"):
        HotsetProfile.load(path, MODEL)
