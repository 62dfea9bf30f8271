"""The engine against `transformers`: same logits, tokens and experts, however requests are batched, chunked, preempted
and wherever the experts are.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from rimuru_jax import Engine, RequestOutput, SamplingParams
from rimuru_jax.models import stack
from tests import oracle
from tests.oracle import LOGIT_TOLERANCE, Case

VOCAB = 160
POOL_BYTES = 3 << 20
GREEDY = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB, detokenize=False
)
TOKENS_ONLY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


@functools.cache
def case(name: str) -> Case:
    return oracle.load(name)


def engine(name: str, **config) -> Engine:
    settings = {
        "dtype": "float32",
        "page_pool_bytes": POOL_BYTES,
        "max_model_len": 192,
        "max_num_seqs": 4,  # one less than there are prompts; and rows are padded to powers of four
    }
    return Engine(case(name).folder, **(settings | config))


def run(engine: Engine, name: str, params: SamplingParams = TOKENS_ONLY) -> list[RequestOutput]:
    outputs = engine.generate([list(p) for p in case(name).prompts], params, use_tqdm=False)
    engine.step()  # pages of the last requests return in the pass after
    engine.allocator.check_ledger()
    assert all(not units for owner in range(100) for units in _held(engine, owner).values())
    return outputs


def _held(engine: Engine, owner: int) -> dict[str, int]:
    return engine.allocator.holds(owner)


def check_tokens(outputs: list[RequestOutput], name: str) -> None:
    for output, tokens in zip(outputs, case(name).tokens, strict=True):
        assert output.outputs[0].token_ids == tokens
        assert output.outputs[0].finish_reason == "length"


def check_logprobs(outputs: list[RequestOutput], name: str) -> None:
    for i, output in enumerate(outputs):
        assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
        _compare(output.outputs[0].logprobs, case(name).logits[i])
        assert output.prompt_logprobs[0] is None
        _compare(output.prompt_logprobs[1:], case(name).prompt_logits[i][:-1])


def _compare(entries, logits: np.ndarray) -> None:
    wanted = (
        logits
        - np.log(np.sum(np.exp(logits - logits.max(1, keepdims=True)), 1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    got = np.array([[entry[token].logprob for token in range(VOCAB)] for entry in entries]).reshape(-1, VOCAB)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("name", oracle.CASES)
class TestOracle:
    def test_alone(self, name: str):
        # Hybrids take long to compile, and `test_batched` has them unchunked too.
        one = engine(name, max_num_batched_tokens=64 if name in oracle.HYBRIDS else 2048)
        outputs = [one.generate(list(p), GREEDY, use_tqdm=False)[0] for p in case(name).prompts]
        check_tokens(outputs, name)
        check_logprobs(outputs, name)

    def test_batched(self, name: str):
        outputs = run(engine(name), name, GREEDY)
        check_tokens(outputs, name)
        check_logprobs(outputs, name)

    @pytest.mark.parametrize("chunk", ["short", 64, 65])
    def test_chunked_prefill(self, name: str, chunk: int | str):
        if chunk == "short":
            chunk = 63 if name in (*oracle.HYBRIDS, "gpt_oss") else 7
        outputs = run(engine(name, max_num_batched_tokens=chunk), name, GREEDY)
        check_tokens(outputs, name)
        check_logprobs(outputs, name)

    def test_one_token_at_a_time_chooses_the_same_experts(self, name: str):
        one = engine(name, max_num_batched_tokens=1, max_num_seqs=1)
        steps = []
        one.experts.observe = lambda counts, tokens, rows: steps.append(counts.copy())
        check_tokens(run(one, name), name)
        # Prompts run one after another; each token but the last is computed, in a step of its own.
        first = sum(len(p) + 23 for p in case(name).prompts[: oracle.LONGEST])
        length = len(case(name).prompts[oracle.LONGEST])
        counts = np.stack(steps[first : first + length])
        layers = one.model_config.moe_layers
        for index, layer in enumerate(layers):
            chosen = [np.flatnonzero(row).tolist() for row in counts[:, index]]
            assert chosen == case(name).values[f"router_experts.{layer}"].tolist()

    def test_every_residency(self, name: str):
        num_experts = engine(name).model_config.moe.num_experts
        ends = (0, num_experts // 2, num_experts)
        for away in range(num_experts + 1) if name in oracle.ATTENTION_ONLY else ends:
            for buffers in (0, 2, 32):
                one = engine(
                    name,
                    memory_policy="fixed",
                    expert_offload_limit=away,
                    loading_buffer_experts=buffers,
                    expert_prefetch="all" if buffers == 2 else "auto",
                )
                assert (one.experts.resident.sum(axis=1) == num_experts - away).all()
                check_tokens(run(one, name), name)

    def test_policies(self, name: str):
        static = engine(name, memory_policy="static")
        assert static.experts.resident.all()
        check_tokens(run(static, name), name)
        for policy in ("online", "hotset", "lru"):
            check_tokens(run(engine(name, memory_policy="elastic", expert_cache_policy=policy), name), name)

    @pytest.mark.parametrize("policy", ["static", "fixed", "elastic"])
    def test_preempted_and_resumed(self, name: str, policy: str):
        limit = {"static": 0, "fixed": 2, "elastic": 2}[policy]
        one = engine(name, memory_policy=policy, expert_offload_limit=limit)
        one.experts.shrink(one.experts.shrinkable_experts)
        one.allocator.begin_pass()
        one.experts.fit_buffers(one.allocator.free_expert_pages)
        # Someone else leaves room for the prompts that run at once, but not for their answers.
        prompts, kinds = case(name).prompts, one.plan.layout.sequence_kinds
        demands = [
            (i, {placed.kind.name: placed.units_for(len(prompt) + 2) for placed in kinds})
            for i, prompt in enumerate(prompts[: one.config.max_num_seqs])
        ]
        too_much = -one.allocator.shortfall(demands)
        one.allocator.allocate(10**6, {"expert": too_much})
        outputs = one.generate([list(p) for p in prompts], TOKENS_ONLY, use_tqdm=False)
        check_tokens(outputs, name)
        assert one.metrics.counters["num_preemptions"] > 0
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0


def test_published_layout_of_qwen3_5():
    check_logprobs(run(engine("qwen3_5_moe_mm"), "qwen3_5_moe", GREEDY), "qwen3_5_moe")


@pytest.mark.parametrize("name", oracle.HYBRIDS)
def test_states_after_the_prompt(name: str):
    one = engine(name)
    one.add_request("it", list(case(name).prompts[oracle.LONGEST]), TOKENS_ONLY)
    one.step()
    (request,) = one.scheduler.running
    for kind, key in (("ssm", "recurrent_state"), ("conv", "conv_state")):
        keepers = [
            layer
            for layer, spec in enumerate(one.model_config.layers)
            if spec.mixer and kind in {state.kind for state in spec.mixer.states()}
        ]
        assert keepers == [
            int(key_.split(".")[1]) for key_ in case(name).values if key_.startswith(f"{key}.")
        ]
        for index, layer in enumerate(keepers):
            view, _ = one.loop.spec.state_view(kind)
            run_length = one.plan.layout[kind].kind.run
            first = one._page_tables.arrays[kind][index, request.slot, 0]
            got = view.read(one.loop.pool, jnp.arange(first, first + run_length, dtype=jnp.int32))
            wanted = case(name).values[f"{key}.{layer}"]
            if kind == "conv":  # all inputs that the next token sees, newest last
                wanted = wanted[:, -run_length:].T[:, None]
            else:
                wanted = wanted[None]
            np.testing.assert_allclose(got, wanted, rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("name", oracle.CASES)
def test_bfloat16_is_as_near_as_transformers(name: str):
    """Weights are bfloat16 in the files; activations, keys and values are now too, recurrent states stay in float32.

    `transformers` in bfloat16 is off by a median of 0.05 to 0.14 in these cases (measured with 5.24.0).
    """
    one = engine(name, dtype="bfloat16", max_num_seqs=5)
    steps = []
    run_step = one.loop.run

    def kept(packed, *, loads_ahead=True):
        steps.append(run_step(packed, loads_ahead=loads_ahead))
        return steps[-1]

    one.loop.run = kept
    prompts = [list(prompt) for prompt in case(name).prompts]
    one.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    (step,) = steps
    got = stack.logits(one.loop.spec, one.loop.params, step.hidden[: sum(map(len, prompts))])
    errors = np.abs(np.asarray(got) - np.concatenate(case(name).prompt_logits))
    assert np.median(errors) <= 0.14


def test_switching_policy_or_residency_compiles_nothing():
    from rimuru_jax.serving_loop import step

    name = "qwen3_moe"
    run(engine(name, memory_policy="static"), name)
    compiled = step._cache_size()  # type: ignore[attr-defined]
    for config in (
        {"memory_policy": "fixed", "expert_offload_limit": 8},
        {"memory_policy": "fixed", "expert_offload_limit": 3, "loading_buffer_experts": 1},
        {"memory_policy": "elastic", "expert_cache_policy": "lru"},
    ):
        run(engine(name, **config), name)
    assert step._cache_size() == compiled  # type: ignore[attr-defined]
