"""One engine under several policies: the same answers, the same programs, nothing left behind."""

import numpy as np
import pytest

from rimuru_jax import Engine, SamplingParams
from rimuru_jax.step_costs import measure_step_costs
from tests.models.tiny_checkpoints import write_checkpoint

EXPERTS, TOP_K = 8, 2
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPTS = [[3, 14, 15, 9], [26, 5], [35, 8, 9, 7, 9, 3]]
POOL = 1 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reconfigure")
    write_checkpoint(folder, "mixtral", seed=2, num_local_experts=EXPERTS)
    return Engine(folder, dtype="float32", page_pool_bytes=POOL, max_num_seqs=4, max_num_batched_tokens=16)


def answers(engine: Engine) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_policies_give_the_same_answers(engine):
    engine.reconfigure(memory_policy="static")
    wanted = answers(engine)
    assert engine.experts.resident.all()
    engine.reconfigure(memory_policy="fixed", expert_offload_limit=5, loading_buffer_experts=2)
    assert (engine.experts.resident.sum(axis=1) == EXPERTS - 5).all()
    assert answers(engine) == wanted
    free = engine.allocator.free_expert_pages
    engine.reconfigure(page_pool_bytes=POOL // 2)
    assert engine.allocator.free_expert_pages < free and engine.plan.pool_bytes <= POOL // 2
    assert answers(engine) == wanted
    engine.reconfigure(memory_policy="elastic", expert_offload_limit="auto", page_pool_bytes=POOL)
    assert answers(engine) == wanted
    engine.allocator.check_ledger()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "bfloat16"}, "dtype cannot change in a running engine"),
        ({"page_pool_bytes": 2 * POOL}, f"page_pool_bytes is {2 * POOL}, but the pool has"),
        ({"page_pool_bytes": 16 * 1024}, "is too small for one request"),
        ({"memory_policy": "static", "expert_offload_limit": 3}, "keeps all experts resident"),
    ],
)
def test_what_cannot_be_changes_nothing(engine, change, sentence):
    config, plan, experts = engine.config, engine.plan, engine.experts
    with pytest.raises(ValueError, match=sentence):
        engine.reconfigure(**change)
    assert (engine.config, engine.plan) == (config, plan) and engine.experts is experts


def test_requests_must_have_ended(engine):
    engine.add_request("late", [1, 2, 3], PARAMS)
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        engine.reconfigure(memory_policy="static")
    engine.abort("late")
    engine.step()
    engine.reconfigure(memory_policy="static")


def test_costs_rise_with_what_is_away(engine):
    engine.reconfigure(memory_policy="elastic", expert_offload_limit=EXPERTS - TOP_K)
    wanted = answers(engine)
    scores = np.random.default_rng(0).random(engine.experts.resident.shape)
    costs = measure_step_costs(engine.loop, engine.config, engine.plan, scores)
    assert costs.requests == (1, 4) and costs.absent == (0, 1, 2, 4, EXPERTS - TOP_K)
    table = np.array(costs.seconds)
    assert table.shape == (2, 5) and (table > 0).all() and (np.diff(table, axis=1) >= 0).all()
    engine.reconfigure()  # what was in the pool is overwritten: it is filled anew
    assert answers(engine) == wanted
