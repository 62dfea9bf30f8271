import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rimuru_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from rimuru_jax.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos, params.seed) == (16, 0, False, None)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.detokenize, params.skip_special_tokens, params.spaces_between_special_tokens) == (
        True,
    ) * 3
    assert params.include_stop_str_in_output is False
    assert (params.stop_strings, params.stop_token_ids) == ((), ())
    assert (params.logit_bias, params.allowed_token_ids) == (None, None)


def test_values_are_normalised():
    ids: Any = np.arange(3)
    params = SamplingParams(stop="end", top_k=-1, stop_token_ids=[7], allowed_token_ids=ids, temperature=1)
    assert params.stop_strings == ("end",)
    assert params.top_k == 0
    assert params.stop_token_ids == (7,)
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.allowed_token_ids is not None
    assert {type(token) for token in params.allowed_token_ids} == {int}
    assert type(params.temperature) is float
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_the_caller_cannot_change_it_afterwards():
    stop, bias, ids = ["a"], {1: 2.0}, [4]
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=ids)
    stop.append("b")
    bias[3] = 1.0
    ids.append(5)
    assert (params.stop_strings, params.logit_bias, params.stop_token_ids) == (("a",), {1: 2.0}, (4,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # pyright: ignore[reportAttributeAccessIssue]
    changed = dataclasses.replace(params, n=2)
    assert (changed.n, changed.stop_strings) == (2, ("a",))


@pytest.mark.parametrize("temperature, greedy", [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_limits_are_allowed():
    SamplingParams(
        top_p=1e-9, min_p=1.0, n=1, max_tokens=1, min_tokens=1, presence_penalty=-2, frequency_penalty=2
    )
    SamplingParams(max_tokens=None, min_tokens=10**6, logprobs=0, prompt_logprobs=0, seed=-(2**63))
    SamplingParams(seed=2**63 - 1, temperature=2, repetition_penalty=0.5, logit_bias={0: -100, 1: 100.0})


IMPOSSIBLE = [
    *[("n", value) for value in (0, -1, 1.5, "2", True, None)],
    *[("temperature", value) for value in (-0.1, float("nan"), float("inf"), "hot", None, True)],
    *[("top_p", value) for value in (0, 0.0, -0.5, 1.01, float("nan"), None)],
    *[("top_k", value) for value in (-2, 1.0, None, False)],
    *[("min_p", value) for value in (-0.01, 1.01, float("nan"))],
    *[("presence_penalty", value) for value in (-2.1, 2.1, float("nan"))],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, float("inf"))],
    *[("repetition_penalty", value) for value in (0, -1.0, float("nan"), float("inf"))],
    *[("seed", value) for value in (1.0, "1", 2**63, -(2**63) - 1, True)],
    *[("max_tokens", value) for value in (0, -1, 2.0, float("nan"))],
    *[("min_tokens", value) for value in (-1, 17, 1.0, None)],
    *[("logprobs", value) for value in (-1, 1.0, True)],
    *[("prompt_logprobs", value) for value in (-1, 2.5)],
    *[("stop", value) for value in ("", ["a", ""], [1], 5, {"a": 1})],
    *[("stop_token_ids", value) for value in ([-1], [1.0], ["a"], 5, [True], [2**31])],
    *[("allowed_token_ids", value) for value in ([], [-1], 3, ["x"])],
    *[
        ("logit_bias", value)
        for value in ({-1: 1.0}, {"a": 1.0}, {1: float("nan")}, {1: 101.0}, {1: None}, [1])
    ],
    *[("ignore_eos", value) for value in (0, None, "yes")],
    ("detokenize", 1),
    ("skip_special_tokens", None),
    ("spaces_between_special_tokens", "no"),
    ("include_stop_str_in_output", 1),
]


@pytest.mark.parametrize("name, value", IMPOSSIBLE, ids=repr)
def test_impossible_values_are_refused_in_one_sentence(name, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "wanted" in message or name == "allowed_token_ids"
    assert "\n" not in message


def test_messages_name_what_came():
    with pytest.raises(ValueError, match=r"^top_p is 1\.5; wanted a number from 0 to 1$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"^min_tokens is 5; wanted at most max_tokens, 4$"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="detokenize is False with stop="):
        SamplingParams(stop="x", detokenize=False)


def test_vocabulary():
    params = SamplingParams(
        stop_token_ids=[9], allowed_token_ids=[0, 9], logit_bias={9: 1.0}, logprobs=10, prompt_logprobs=10
    )
    params.validate_for_vocab(10)
    SamplingParams().validate_for_vocab(1)
    ids: list[dict[str, Any]] = [
        {"stop_token_ids": [3, 10]},
        {"allowed_token_ids": [10]},
        {"logit_bias": {10: 0.5}},
    ]
    for case in ids:
        with pytest.raises(ValueError, match=f"{next(iter(case))} has token id 10; wanted ids below"):
            SamplingParams(**case).validate_for_vocab(10)
    numbers: list[dict[str, Any]] = [{"logprobs": 11}, {"prompt_logprobs": 11}]
    for case in numbers:
        with pytest.raises(ValueError, match=f"^{next(iter(case))} is 11; wanted at most"):
            SamplingParams(**case).validate_for_vocab(10)


def test_request_output_has_the_known_names():
    completion = CompletionOutput(
        index=0,
        text="hi",
        token_ids=[3],
        cumulative_logprob=-0.5,
        logprobs=[{3: Logprob(-0.5, 1, "hi")}],
        finish_reason="stop",
        stop_reason=3,
    )
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=1.5, first_token_time=3.0)
    output = RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=[1], outputs=[completion], finished=True, metrics=metrics
    )
    assert {field.name for field in dataclasses.fields(output)} == {
        "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics",
        "num_cached_tokens",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(completion)} == {
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason",
    }  # fmt: skip
    assert completion.finished()
    assert not dataclasses.replace(completion, finish_reason=None).finished()
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (0.5, 2.0)
    assert RequestMetrics(arrival_time=1.0).time_to_first_token is None


def test_neither_module_imports_jax():
    # The package's own __init__ may import jax; the files of these modules must not.
    for name in ("sampling_params", "outputs"):
        module = sys.modules[f"rimuru_jax.{name}"]
        assert module.__file__ is not None
        code = (
            "import sys, importlib.util as u; "
            f"s = u.spec_from_file_location('m', {module.__file__!r}); m = u.module_from_spec(s); "
            "sys.modules['m'] = m; s.loader.exec_module(m); sys.exit('jax' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
