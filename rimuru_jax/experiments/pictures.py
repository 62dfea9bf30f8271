"""Pictures of what happened to a pool over time (extra `experiments`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rimuru_jax.experiments.simulator import Timeline

COLOURS = {
    "expert": "#4c72b0",
    "loading buffers": "#8fa8d0",
    "kv": "#dd8452",
    "ssm": "#55a868",
    "conv": "#c44e52",
    "free": "#e6e6e6",
}
NAMES = {
    "expert": "resident experts",
    "kv": "keys and values",
    "ssm": "recurrent states",
    "conv": "conv states",
}
POINTS = 250
"""Steps drawn, at most."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"pictures need the package {error.name}: install rimuru-jax[experiments]"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def pool_over_time(timelines: Mapping[str, Timeline], path: Path, title: str) -> None:
    """One row per run: what the pool holds, stacked, above the requests that run and wait."""
    pyplot = _pyplot()
    heights = [2.2, 1] * len(timelines)
    figure, axes = pyplot.subplots(
        2 * len(timelines),
        1,
        figsize=(10, 2.6 * len(timelines) + 0.8),
        height_ratios=heights,
        squeeze=False,
        sharex=True,  # so that who is done sooner is seen
        layout="constrained",
    )
    for (name, timeline), pool, requests in zip(timelines.items(), axes[::2, 0], axes[1::2, 0], strict=True):
        steps = np.unique(np.linspace(0, len(timeline.seconds) - 1, POINTS).astype(int))
        seconds = np.asarray(timeline.seconds)[steps]
        kinds = [kind for kind in COLOURS if kind in timeline.pool_bytes]
        kinds += [kind for kind in timeline.pool_bytes if kind not in COLOURS]
        pool.stackplot(
            seconds,
            [np.asarray(timeline.pool_bytes[kind])[steps] / 2**30 for kind in kinds],
            colors=[COLOURS.get(kind, "#999999") for kind in kinds],
            labels=[NAMES.get(kind, kind) for kind in kinds],
        )
        pool.set_ylabel("GiB of the pool")
        pool.set_title(name, loc="left", fontsize=10)
        pool.margins(x=0, y=0)
        requests.plot(seconds, np.asarray(timeline.running)[steps], color="#333333", label="running")
        requests.plot(seconds, np.asarray(timeline.waiting)[steps], color="#bbbbbb", label="waiting")
        requests.set_ylabel("requests")
        requests.margins(x=0)
        requests.legend(loc="upper right", fontsize=8, frameon=False, ncols=2)
    axes[-1, 0].set_xlabel("seconds")
    figure.suptitle(title, fontsize=11)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)
    pyplot.close(figure)
