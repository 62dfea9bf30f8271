"""The device side alone: packing, buckets, and what a running step never sees change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru_jax.host.expert_cache import HOST, ExpertCopy
from rimuru_jax.host.pool_plan import choose_layout
from rimuru_jax.models.checkpoint import load_checkpoint
from rimuru_jax.models.config import ElementBytes
from rimuru_jax.models.context import ModelSpec
from rimuru_jax.models.stack import stack_params, unroll_params
from rimuru_jax.sampling import SamplingRow, build_sampling_inputs
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.serving_loop import (
    IN_FLIGHT,
    Chunk,
    ServingLoop,
    bucket_for,
    buckets,
    pack,
    step,
)
from tests.models.tiny_checkpoints import write_checkpoint

LAYERS, EXPERTS, MATRICES = 3, 8, 3


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=8))
def test_pack_keeps_every_chunk(rows):
    chunks = [Chunk(slot, list(range(start, start + count)), start) for slot, start, count in rows]
    packed, bucket = pack(chunks)
    batch = packed.unpack()
    total = sum(count for *_, count in rows)
    assert bucket.tokens >= total and bucket.rows >= len(rows)
    assert bucket.decode == all(count == 1 for *_, count in rows)
    assert batch.query_start[-1] == total
    for row, (slot, start, count) in enumerate(rows):
        first, end = int(batch.query_start[row]), int(batch.query_start[row + 1])
        assert end - first == count
        assert np.asarray(batch.token_ids)[first:end].tolist() == list(range(start, start + count))
        assert np.asarray(batch.positions)[first:end].tolist() == list(range(start, start + count))
        assert (np.asarray(batch.rows)[first:end] == row).all()
        assert (batch.slots[row], batch.context_len[row], batch.logit_tokens[row]) == (
            slot,
            start + count,
            end - 1,
        )
    assert (np.asarray(batch.context_len)[len(rows) :] == 0).all()


@given(st.integers(1, 64), st.integers(1, 512))
def test_buckets_lists_every_bucket_a_step_can_have(max_num_seqs, tokens):
    max_tokens = max(tokens, max_num_seqs)
    known = set(buckets(max_tokens, max_num_seqs))
    for rows in range(1, max_num_seqs + 1):
        for count in {rows, min(rows + 1, max_tokens), (rows + max_tokens) // 2, max_tokens}:
            bucket = bucket_for(count, rows)
            assert bucket in known
            assert bucket.tokens >= count and bucket.rows >= rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    write_checkpoint(folder, "mixtral", seed=2, num_local_experts=EXPERTS)
    return folder


def make(folder) -> ServingLoop:
    loaded = load_checkpoint(folder, "float32")
    layout = choose_layout(lambda t: loaded.config.page_kinds(ElementBytes(weight=4, state=4), t))
    spec = ModelSpec.create(loaded.config, layout, "float32")
    loop = ServingLoop(
        spec,
        stack_params(loaded.config, loaded.params),
        loaded.host_pages,
        layout,
        num_huge_pages=layout.num_huge_pages(1 << 20),
        max_num_seqs=2,
        max_model_len=32,
    )
    # Whatever nobody wrote is NaN, scratch included.
    loop.pool = jnp.full_like(loop.pool, 0xFFFF)
    return loop


def own_tables(loop: ServingLoop, slot: int, first: int):
    """Pages for 32 tokens of a slot, from the KV page `first` on."""
    tables, _, width = loop.tables["kv"].shape
    index = np.array([(t, slot, c) for t in range(tables) for c in range(width)], np.int32)
    pages = np.arange(first, first + len(index), dtype=np.int32)
    # As many as fill the padded update, so that nothing but a copy keeps them apart from it.
    size = max(8, 1 << (len(pages) - 1).bit_length())
    repeat = np.arange(size) % len(pages)
    return index[repeat], pages[repeat]


def kv_start(loop: ServingLoop) -> int:
    """First KV page behind scratch and room for 130 expert pages."""
    view, layers_per_page = loop.spec.state_view("kv")
    words = view.stride * layers_per_page
    return -(-131 * loop.pool.shape[1] // words)


def test_a_scheduler_of_ones_own(model):
    """Prefill in two chunks and decode, by hand; all experts on the host."""
    loop = make(model)
    loop.update_tables({"kv": own_tables(loop, 1, kv_start(loop))})
    whole = loop.run(pack([Chunk(1, [5, 6, 7, 8, 9], 0)])).logits[0]
    again = make(model)
    again.update_tables({"kv": own_tables(again, 0, kv_start(again) + 7)})
    again.run(pack([Chunk(0, [5, 6, 7], 0)]))
    again.run(pack([Chunk(0, [8], 3)]))
    parts = again.run(pack([Chunk(0, [9], 4)])).logits[0]
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)


def test_layers_without_a_loop_are_those_of_the_loop(model):
    loop = make(model)
    loop.update_tables({"kv": own_tables(loop, 1, kv_start(loop))})
    looped = loop.run(pack([Chunk(1, [5, 6, 7, 8, 9], 0)])).logits[0]
    packed, bucket = pack([Chunk(1, [5, 6, 7, 8, 9], 0)])
    arguments = (loop.pool, loop.host_pages, loop.tables, loop.experts, packed, loop.last_tokens)
    params = unroll_params(loop.params, list)
    *_, outputs = step(params, *arguments, spec=loop.spec, decode=bucket.decode)
    np.testing.assert_allclose(outputs.logits[0], looped, rtol=0, atol=1e-5)


def test_a_sampled_token_goes_on_without_the_host(model):
    """Two slots in turned rows beside padding: as if the host had put the tokens in."""
    row = SamplingRow(
        params=SamplingParams(temperature=0),
        seed=0,
        prompt_token_ids=(),
        output_token_ids=(),
        num_output_tokens=0,
        stop_token_ids=(),
    )
    loop = make(model)
    for slot, first in ((0, kv_start(loop)), (1, kv_start(loop) + 16)):
        loop.update_tables({"kv": own_tables(loop, slot, first)})
    prompts = {0: [5, 6, 7], 1: [8, 9]}
    outputs = loop.run(pack([Chunk(slot, ids, 0) for slot, ids in prompts.items()]))
    tokens = loop.sample(outputs, *build_sampling_inputs([row] * 2, *outputs.logits.shape)).token_ids
    assert tokens[0] != tokens[1]
    held = loop.run(pack([Chunk(1, [IN_FLIGHT], 2), Chunk(0, [IN_FLIGHT], 3)])).logits
    known = loop.run(pack([Chunk(1, [int(tokens[1])], 2), Chunk(0, [int(tokens[0])], 3)])).logits
    np.testing.assert_array_equal(held, known)
    # A row of padding writes nobody's token.
    before = int(loop.last_tokens[0])
    alone = loop.run(pack([Chunk(1, [3, 4, 5], 2)]))
    loop.sample(alone, *build_sampling_inputs([row], *alone.logits.shape))
    assert loop.last_tokens[0] == before
    # What is asked for counts, not the most probable token, which the step had noted.
    other = (int(alone.greedy.token_ids[0]) + 1) % alone.logits.shape[1]
    asked = dataclasses.replace(row, params=SamplingParams(temperature=0, allowed_token_ids=[other]))
    loop.sample(alone, *build_sampling_inputs([asked], *alone.logits.shape))
    assert loop.last_tokens.tolist()[:2] == [before, other]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 64 bytes, where JAX on a CPU reads a numpy array in place if it is let."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_a_running_step_never_sees_later_edits(model):
    """Law 9: everything that was handed over is scribbled on at once, before any result is looked at."""
    results = []
    for scribble in (False, True):

        def handed(*arrays: np.ndarray, scribble=scribble) -> None:
            if scribble:
                for array in arrays:
                    array[...] = 77

        loop = make(model)
        index, pages = map(aligned, own_tables(loop, 0, kv_start(loop)))
        loop.update_tables({"kv": (index, pages)})
        handed(index, pages)
        resident = np.arange(1, 1 + LAYERS * MATRICES, dtype=np.int32).reshape(LAYERS, MATRICES)
        loop.copy_experts([ExpertCopy(layer, 0, tuple(resident[layer].tolist())) for layer in range(LAYERS)])
        table = np.full((LAYERS, EXPERTS, MATRICES), HOST, np.int32)
        table[:, 0] = resident
        loads = np.tile(np.array([2, 3], np.int32), (LAYERS, 1))
        buffers = np.arange(20, 32, dtype=np.int32).reshape(2, 2, MATRICES)
        for layer in range(LAYERS):
            table[layer, [2, 3]] = buffers[layer % 2]
        table, loads, buffers = aligned(table), aligned(loads), aligned(buffers)
        loop.set_experts(table, loads, buffers)
        handed(table, loads, buffers)
        prompt = aligned(np.arange(3, 20, dtype=np.int32))
        packed = pack([Chunk(0, prompt, 0)])  # type: ignore[arg-type]
        handed(prompt)
        first = loop.run(packed)
        # The next step's settings are made, and scribbled on, while the first runs.
        table = aligned(np.full((LAYERS, EXPERTS, MATRICES), HOST, np.int32))
        loads, buffers = np.zeros((LAYERS, 0), np.int32), np.zeros((2, 0, MATRICES), np.int32)
        loop.set_experts(table, loads, buffers)
        handed(table)
        index, pages = map(aligned, own_tables(loop, 1, kv_start(loop) + 20))
        loop.update_tables({"kv": (index, pages)})
        handed(index, pages)
        second = loop.run(pack([Chunk(0, [20], 17), Chunk(1, [7], 0)]))
        results.append(np.concatenate([first.logits, second.logits]))
    assert np.isfinite(results[0]).all()
    assert (results[0] == results[1]).all()


def test_residency_changes_no_bit_and_compiles_nothing(model):
    """Laws 11 and 12 through the whole step; 8 experts are away in the first cases, with fewer buffers than that."""
    loop = make(model)
    loop.update_tables({"kv": own_tables(loop, 0, kv_start(loop))})
    resident = np.arange(1, 1 + LAYERS * EXPERTS * MATRICES, dtype=np.int32)
    resident = resident.reshape(LAYERS, EXPERTS, MATRICES)
    rng = np.random.default_rng(0)
    cases = [
        (kept, buffers) for kept in (0, 3, EXPERTS) for buffers in (0, 2, 8) if kept + buffers <= EXPERTS
    ]
    expected, compiled = {}, None
    for kept, num_buffers in cases:
        table = np.full((LAYERS, EXPERTS, MATRICES), HOST, np.int32)
        buffers = np.arange(75, 75 + 2 * num_buffers * MATRICES, dtype=np.int32)
        buffers = buffers.reshape(2, num_buffers, MATRICES)
        loads = np.full((LAYERS, num_buffers), -1, np.int32)
        for layer in range(LAYERS):
            order = rng.permutation(EXPERTS)
            keep, load = order[:kept], order[kept : kept + num_buffers]
            table[layer, keep], table[layer, load] = resident[layer, keep], buffers[layer % 2]
            loads[layer] = load
            loop.copy_experts(
                [ExpertCopy(layer, e, tuple(resident[layer, e].tolist())) for e in keep.tolist()]
            )
        loop.set_experts(table, loads, buffers)
        for chunk in (Chunk(0, list(range(3, 20)), 0), Chunk(0, [20], 17)):
            outputs = loop.run(pack([chunk]))
            first = expected.setdefault(chunk.start, outputs)
            assert np.isfinite(outputs.logits).all()
            assert (np.asarray(outputs.logits) == np.asarray(first.logits)).all(), (kept, num_buffers)
            assert (np.asarray(outputs.router_counts) == np.asarray(first.router_counts)).all()
        compiled = compiled or step._cache_size()  # type: ignore[attr-defined]
        # Nothing that was read here is left for the next case.
        loop.pool = loop.pool.at[:131].set(jnp.uint16(0xFFFF))
    assert step._cache_size() == compiled  # type: ignore[attr-defined]


def test_the_host_store_is_not_copied_on_a_cpu(model):
    if jax.default_backend() != "cpu":
        pytest.skip("host memory is another memory there")
    loaded = load_checkpoint(model, "float32")
    array = jax.device_put(loaded.host_pages)
    assert array.unsafe_buffer_pointer() == loaded.host_pages.ctypes.data
