"""Pictures of what happened to a pool over time, and of what it was worth (extra `experiments`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rimuru_jax.bench.report import milliseconds
from rimuru_jax.experiments.results import RunResult

COLOURS = {
    "expert": "#4c72b0",
    "loading buffers": "#8fa8d0",
    "kv": "#dd8452",
    "ssm": "#55a868",
    "conv": "#ccb974",
    "free": "#e6e6e6",
}
NAMES = {
    "expert": "resident experts",
    "kv": "keys and values",
    "ssm": "recurrent states",
    "conv": "conv states",
}
LINES = ("#333333", "#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
GIVEN_UP, TAKEN_BACK = "#b2182b", "#1b7837"
POINTS = 600
"""Moments drawn, at most."""
BINS = 120
"""Intervals in which arrivals and moves of experts are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves over one axis; `levels` are drawn across it."""

    label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    log: bool = False


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


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)


def pool_over_time(results: Mapping[str, RunResult], path: Path, title: str) -> None:
    """Per run: what the pool holds, stacked; experts that move; requests that arrive, run and wait."""
    pyplot = _pyplot()
    moving = [any(np.diff(result.timeline.resident_experts)) for result in results.values()]
    heights = [height for moves in moving for height in ((2.4, 0.7, 1.1) if moves else (2.4, 1.1))]
    figure, axes = pyplot.subplots(
        len(heights),
        1,
        figsize=(11, 0.88 * sum(heights) + 1.1),
        height_ratios=heights,
        sharex=True,  # so that who is done sooner is seen
        layout="constrained",
    )
    end = max(result.seconds for result in results.values())
    edges = np.linspace(0, end, BINS + 1)
    rows, legend = iter(axes), {}
    for (name, result), moves in zip(results.items(), moving, strict=True):
        drawn = [pool := next(rows)]
        _draw_pool(pool, result)
        if moves:
            drawn.append(next(rows))
            _draw_moves(drawn[-1], result, edges)
        drawn.append(next(rows))
        _draw_requests(drawn[-1], result, edges)
        for axis in drawn:
            legend |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        ttft = milliseconds(result.requests)["ttft"] / 1000
        figures = f"at most {result.peak_running} at once, {result.steps:,} steps"
        if len(ttft):
            figures += f", TTFT p50 {np.median(ttft):.1f} s, p99 {np.percentile(ttft, 99):.1f} s"
        pool.set_title(name, loc="left", fontsize=10, fontweight="bold")
        pool.set_title(figures, loc="right", fontsize=9)
    axes[-1].set_xlabel("seconds")
    axes[0].set_xlim(0, end)
    figure.suptitle(title, fontsize=11)
    figure.legend(
        legend.values(), legend.keys(), loc="outside lower center", ncols=6, fontsize=9, frameon=False
    )
    figure.align_ylabels(axes)
    _save(figure, path)


def _draw_pool(pool: Any, result: RunResult) -> None:
    timeline = result.timeline
    ends = np.asarray(timeline.seconds)
    steps = np.unique(np.minimum(np.searchsorted(ends, np.linspace(0, ends[-1], POINTS)), len(ends) - 1))
    kinds = [kind for kind in COLOURS if kind in timeline.pool_bytes]
    kinds += [kind for kind in timeline.pool_bytes if kind not in COLOURS]
    pool.stackplot(
        ends[steps],
        [np.asarray(timeline.pool_bytes[kind])[steps] / 2**30 for kind in kinds],
        colors=[COLOURS.get(kind, "#999999") for kind in kinds],
        labels=[NAMES.get(kind, kind) for kind in kinds],
    )
    pool.set_ylabel("GiB of the pool")
    pool.margins(x=0, y=0)
    last = timeline.resident_experts[-1]
    if last and timeline.pool_bytes["expert"][-1]:
        whole = timeline.pool_bytes["expert"][-1] / last * result.experts / 2**30
        percent = pool.secondary_yaxis(
            "right", functions=(lambda gib: 100 * gib / whole, lambda share: share * whole / 100)
        )
        percent.set_ylabel("% of all experts", fontsize=8)


def _draw_moves(axis: Any, result: RunResult, edges: np.ndarray) -> None:
    """Experts given up and taken back in each interval."""
    change = np.diff(np.asarray(result.timeline.resident_experts, float), prepend=np.nan)
    ends, width = np.asarray(result.timeline.seconds), edges[1] - edges[0]
    for sign, colour, label in ((1, TAKEN_BACK, "experts taken back"), (-1, GIVEN_UP, "experts given up")):
        moved = np.where(sign * change > 0, change, 0.0)
        counts, _ = np.histogram(ends, edges, weights=moved)
        axis.bar(edges[:-1], counts, width, align="edge", color=colour, label=label)
    axis.axhline(0, color="#999999", linewidth=0.5)
    axis.set_ylabel("experts\nmoved", fontsize=8)


def _draw_requests(axis: Any, result: RunResult, edges: np.ndarray) -> None:
    timeline = result.timeline
    ends = np.asarray(timeline.seconds)
    came, _ = np.histogram([request.start for request in result.requests], edges)
    axis.bar(edges[:-1], came, edges[1] - edges[0], align="edge", color="#cfd8e8", label="requests arriving")
    steps = np.unique(np.minimum(np.searchsorted(ends, np.linspace(0, ends[-1], POINTS)), len(ends) - 1))
    axis.plot(
        ends[steps], np.asarray(timeline.waiting)[steps], color="#8172b3", linewidth=1.1, label="waiting"
    )
    axis.plot(
        ends[steps], np.asarray(timeline.running)[steps], color="#333333", linewidth=1.1, label="running"
    )
    axis.set_ylabel("requests")


def latencies(results: Mapping[str, RunResult], path: Path, title: str) -> None:
    """How many requests waited how long for their first token, and for each further one."""
    shares = np.concatenate([np.linspace(0, 99, 100), np.linspace(99.1, 99.9, 9)])
    panels = []
    for metric, label, unit in (
        ("ttft", "time to first token, s", 1000),
        ("tpot", "time per output token, ms", 1),
    ):
        lines = {
            name: (shares.tolist(), (np.percentile(values, shares) / unit).tolist())
            for name, result in results.items()
            if len(values := milliseconds(result.requests)[metric])
        }
        panels.append(Panel(label=label, lines=lines, log=True))
    curves(panels, path, title, across="percentile of requests", marker="")


def curves(panels: Sequence[Panel], path: Path, title: str, *, across: str, marker: str = "o") -> None:
    """Panels beside each other over the same axis; a name has the same colour in all."""
    pyplot = _pyplot()
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.4 * columns + 0.6, 3.4 * rows + 1), squeeze=False, layout="constrained"
    )
    names = list(dict.fromkeys(name for panel in panels for name in (*panel.lines, *panel.levels)))
    colours = {name: LINES[number % len(LINES)] for number, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, (x, y) in panel.lines.items():
            (handles[name],) = axis.plot(x, y, marker=marker, markersize=4, color=colours[name])
        for name, level in panel.levels.items():
            handles[name] = axis.axhline(level, color=colours[name], linestyle="--")
        if panel.log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(panel.label, fontsize=10)
        axis.set_xlabel(across)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(title, fontsize=11)
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(names), 3),
        fontsize=9,
        frameon=False,
    )
    _save(figure, path)


def bars(panels: Mapping[str, Mapping[str, float]], path: Path, title: str) -> None:
    """Panels of one bar per name, the same names in all; the figure stands beside each bar."""
    pyplot = _pyplot()
    names = list(next(iter(panels.values())))
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(3.4 * len(panels) + 1.6, 0.45 * len(names) + 1.4),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, (label, values) in zip(axes.flat, panels.items(), strict=True):
        heights = [values[name] for name in names]
        drawn = axis.barh(names, heights, color=[LINES[1]] + [COLOURS["loading buffers"]] * (len(names) - 1))
        axis.bar_label(
            drawn, fmt=lambda value: f" {value:.3g}" if value < 100 else f" {value:.0f}", fontsize=8
        )
        axis.set_xlim(0, 1.2 * max(heights, default=1) or 1)
        axis.set_title(label, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def grids(
    panels: Mapping[str, np.ndarray], rows: Sequence[str], columns: Sequence[str], path: Path, title: str
) -> None:
    """Panels of numbers in coloured cells, the larger the darker: float[rows, columns]."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(4.4 * len(panels) + 1, 0.5 * len(rows) + 2),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, (label, values) in zip(axes.flat, panels.items(), strict=True):
        least, spread = float(values.min()), float(np.ptp(values)) or 1.0
        shade = (values - least) / spread
        axis.imshow(shade, cmap="Blues", vmin=-0.2, vmax=1.3, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            colour = "white" if shade[row, column] > 0.6 else "black"
            shown = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            axis.text(column, row, shown, ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=8)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.set_xlabel("requests from")
        axis.set_title(label, fontsize=10)
    axes[0, 0].set_ylabel("profile from")
    figure.suptitle(title, fontsize=11)
    _save(figure, path)
