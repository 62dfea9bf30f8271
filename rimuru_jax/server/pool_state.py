"""The page pool and everything in it, as JSON."""

import dataclasses
import itertools
from typing import Any

from rimuru_jax.engine import Engine
from rimuru_jax.host.request import Request


def pool_state(engine: Engine, num_events: int) -> dict[str, Any]:
    """The pool by kind and level, resident experts by layer, requests, and the newest events, newest last.

    Call it between two steps: it reads what they change.
    """
    layout, ledger, experts = engine.plan.layout, engine.allocator.ledger(), engine.experts
    kinds = {
        placed.kind.name: {
            **dataclasses.asdict(ledger.kinds[placed.kind.name]),
            "unit_bytes": placed.stride_bytes * placed.kind.run,
        }
        for placed in layout.kinds
    }
    events = list(engine.metrics.events())[-num_events:] if num_events else []
    return {
        "pool_bytes": engine.plan.pool_bytes,
        "huge_page_bytes": layout.huge_page_bytes,
        "huge_pages": ledger.huge_pages,
        "free_huge_pages": ledger.free_huge_pages,
        "kinds": kinds,
        "huge_page_uses": _runs(engine.allocator.huge_page_uses()),
        "experts": {
            "memory_policy": engine.plan.memory_policy,
            "per_layer": experts.resident.shape[1],
            "floor": experts.floor,
            "buffers": experts.buffer_experts,
            "resident": experts.resident.sum(axis=1).tolist(),
            # One character per expert: 1 resident, 0 away.
            "map": ["".join(map(str, layer)) for layer in experts.resident.astype(int).tolist()],
        },
        "requests": [_request(request) for request in (*engine.scheduler.running, *engine.scheduler.waiting)],
        "metrics": engine.metrics.snapshot(),
        "events": [{"step": event.step, "name": event.name, **event.fields} for event in events],
    }


def _runs(uses: list[str]) -> list[tuple[str, int]]:
    """Equal neighbours together: (use, how many huge pages in a row)."""
    return [(use, len(list(group))) for use, group in itertools.groupby(uses)]


def _request(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "status": request.status.value,
        "prompt_tokens": len(request.prompt_token_ids),
        "output_tokens": len(request.output_token_ids),
        "computed_tokens": request.num_computed_tokens,
        "priority": request.priority,
        "preemptions": request.num_preemptions,
    }
