"""Sizes measured to be the best, kept as data: `tuned/<card>.json`, which `benchmarks/tune_moe.py` writes.

A file lists, for experts of one shape, up to which number of (token, expert) pairs which sizes are best.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rimuru_jax.pallas.memory_view import MemoryView

FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What sizes depend on."""

    experts: int
    f: int
    d: int
    matrices: int

    @classmethod
    def of(cls, view: MemoryView, experts: int, matrices: int) -> "ExpertShape":
        f, d = view.page_shape
        return cls(experts=experts, f=f, d=d, matrices=matrices)


def file_name(card: str) -> str:
    """Of the data for a card: "NVIDIA H200" is nvidia_h200.json."""
    return card.lower().replace(" ", "_") + ".json"


@functools.cache
def _entries(card: str) -> dict[ExpertShape, list[dict[str, Any]]]:
    path = FOLDER / file_name(card)
    if not path.exists():
        return {}
    return {
        ExpertShape(**entry["shape"]): entry["sizes"] for entry in json.loads(path.read_text())["entries"]
    }


def tuned(experts: ExpertShape, pairs: int) -> dict[str, Any] | None:
    """The sizes for `pairs` (token, expert) pairs on the default device, None where nothing was measured.

    Returns {"up_to": pairs, "tile": tokens, "gate_up": fields of a `Launch`, "down": the same}.
    """
    for sizes in _entries(jax.devices()[0].device_kind).get(experts, ()):
        if pairs <= sizes["up_to"]:
            return sizes
    return None
