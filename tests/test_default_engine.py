"""The embedded default model through the engine: the dense model's logits, and sensible text."""

from itertools import pairwise

import numpy as np
import pytest

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.models.default_model import default_model_path
from tests.oracle import DATA, LOGIT_TOLERANCE

COLUMNS = 64  # every 64th token of the vocabulary was kept


@pytest.fixture(scope="module")
def dense() -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "smollm2_dense.npz"))


def test_the_split_model_equals_the_dense_one(dense):
    """Logits of `transformers` on the dense model, weights rounded to bfloat16 and computed in float32."""
    engine = Engine(default_model_path(), dtype="float32", page_pool_bytes=256 << 20, max_model_len=256)
    for i in range(sum(key.startswith("prompt.") for key in dense)):
        ids = dense[f"prompt.{i}"].tolist()
        vocab = engine.model_config.vocab_size
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=vocab, detokenize=False)
        output = engine.generate(ids, params, use_tqdm=False)[0].outputs[0]
        assert output.token_ids == [dense[f"best.{i}"][-1]]
        assert output.logprobs is not None
        got = np.array([output.logprobs[0][token].logprob for token in range(0, vocab, COLUMNS)])
        wanted = dense[f"logits.{i}"][-1]
        # Log-probabilities are logits less one constant per position.
        np.testing.assert_allclose(got - got.mean(), wanted - wanted.mean(), rtol=0, atol=LOGIT_TOLERANCE)


def test_every_position_agrees_on_the_most_probable_token(dense):
    engine = Engine(default_model_path(), dtype="float32", page_pool_bytes=256 << 20, max_model_len=256)
    longest = max((key for key in dense if key.startswith("prompt.")), key=lambda key: len(dense[key]))
    i = longest.split(".")[1]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    output = engine.generate(dense[longest].tolist(), params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    compared = 0
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        if dense[f"margin.{i}"][position] > LOGIT_TOLERANCE:
            assert entry is not None
            assert (
                next(token for token, value in entry.items() if value.rank == 1)
                == dense[f"best.{i}"][position]
            )
            compared += 1
    assert compared > 100


def test_it_answers_with_less_pool_than_experts():
    engine = Engine()
    plan = engine.plan
    assert plan.pool_bytes < plan.expert_pages * plan.page_bytes
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = engine.chat(question, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert engine.metrics.counters["expert_buffer_hits"] > 0


def test_stop_strings_and_streaming_agree():
    engine = Engine()
    prompt = "France, Germany, Spain,"
    free = SamplingParams(temperature=0, max_tokens=24)
    text = engine.generate(prompt, free, use_tqdm=False)[0].outputs[0].text
    stop = text[20:26]
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop])
    texts = [output.outputs[0].text for output in engine.stream(prompt, params)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    whole = engine.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert whole.text == texts[-1] == text[: text.index(stop)]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
