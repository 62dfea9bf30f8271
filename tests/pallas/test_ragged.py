"""Chunks of ragged rows, and the decays inside a chunk."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as cases
from hypothesis import strategies as st

from rimuru_jax.pallas.ragged import CHUNK, Chunks, chunk_decays


@cases(lengths=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 130]), min_size=6, max_size=6))
def test_chunks_hold_every_token_of_long_rows_once(lengths):
    tokens, start = 6 * 130, np.cumsum([0, *lengths])
    chunks = Chunks.cut(jnp.asarray(start, jnp.int32), tokens)
    token, place = np.asarray(chunks.token), np.asarray(chunks.place)
    wanted = {t for row, n in enumerate(lengths) if n > 1 for t in range(start[row], start[row + 1])}
    assert sorted(token[token < tokens]) == sorted(wanted)
    for row, n in enumerate(lengths):
        first, count = int(chunks.first[row]), int(chunks.number[row])
        assert count == (-(-n // CHUNK) if n > 1 else 0)
        held = token[first : first + count].reshape(-1)
        assert (held[:n] == np.arange(start[row], start[row + 1])[: len(held)]).all()
        assert (held[n:] == tokens).all()
    for t in range(tokens):
        assert place[t] == token.size if t not in wanted else token.reshape(-1)[place[t]] == t


@pytest.mark.parametrize("forgetful", [False, True])
def test_chunk_decays(forgetful):
    """Also where small decays follow a large one."""
    log_decay = -np.random.default_rng(0).uniform(0, 0.3, size=(2, CHUNK, 3)).astype(np.float32)
    if forgetful:
        log_decay[:, ::7] = -3e4
    from_start, to_end, between = chunk_decays(jnp.asarray(log_decay))
    exact = log_decay.astype(np.float64).transpose(0, 2, 1)
    sums = np.full((*exact.shape, CHUNK), -np.inf)
    for i in range(CHUNK):
        for j in range(i + 1):
            sums[:, :, i, j] = exact[:, :, j + 1 : i + 1].sum(-1)
    # Sums of at most 64 terms below 0.3, each within a rounding of float32.
    for got, wanted in (
        (between, np.exp(sums)),
        (to_end, np.exp(sums[:, :, -1])),
        (from_start, np.exp(sums[:, :, :, 0] + exact[:, :, :1])),
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-30)
