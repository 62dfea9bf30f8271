"""The gated delta rule of `flash-linear-attention`, to measure beside ours; needs torch, triton and `fla-core`.

Forward only, its normalisation of queries and keys inside, final states kept, sequences packed with `cu_seqlens` in prefills.
It takes 16 key heads for 32 value heads as they are. Decodes are `fused_recurrent`, one sequence of one token each. Calls run
from a CUDA graph, after its own tuning, so that neither Python nor launches count.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def missing() -> str | None:
    """Why it cannot be measured, or None."""
    try:
        import fla.ops.gated_delta_rule  # noqa: F401  # pyright: ignore[reportMissingImports]
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:
        return repr(error)
    return None


class GatedDelta:
    """`layers` calls, each over states of its own and each feeding its outputs to the next, as one CUDA graph.

    Inputs as of `recurrent_kernels.delta_inputs`, `rows` rows of the same length.
    """

    def __init__(self, inputs: Sequence[jax.Array], rows: int, layers: int):
        import torch  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )

        self._torch, self._layers = torch, layers
        first, q, k, log_decay, beta = (torch.from_dlpack(x)[None] for x in inputs)
        tokens = first.shape[1]
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        if tokens == rows:
            operator = fused_recurrent_gated_delta_rule
            first, q, k, log_decay, beta = (x.transpose(0, 1) for x in (first, q, k, log_decay, beta))
            states = torch.zeros((layers, rows, first.shape[2], q.shape[3], first.shape[3]), device="cuda")
        else:
            operator, states = chunk_gated_delta_rule, [None] * layers
            starts = torch.arange(rows + 1, device="cuda", dtype=torch.long) * (tokens // rows)
            options["cu_seqlens"] = starts

        def calls():
            out = result = first
            for state in states:
                out, _ = operator(q, k, result, g=log_decay, beta=beta, initial_state=state, **options)
                result = result + out
            return out

        side = torch.cuda.Stream()
        with torch.no_grad():
            with torch.cuda.stream(side):
                for _ in range(2):
                    calls()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = calls()

    def seconds(self, launches: int) -> float:
        """Of one call among `launches` graphs in a row."""
        start = time.perf_counter()
        for _ in range(launches):
            self._graph.replay()
        self._torch.cuda.synchronize()
        return (time.perf_counter() - start) / launches / self._layers

    def result(self) -> jax.Array:
        """Outputs of the last call: `[T, Hv, dv]`."""
        out = self._result
        return jnp.from_dlpack(out.reshape(-1, *out.shape[2:]).contiguous())
