"""Results of replays as a table, as JSON and as a plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcache.replay.run import ReplayResult


def table(results: Sequence[ReplayResult]) -> str:
    """One line per result, hit rates in percent of prompt tokens."""
    rows = [("policy", "blocks", "hit tokens", "hit rate", "evicted", "seconds")]
    rows += [
        (
            result.policy,
            f"{result.num_blocks:,}",
            f"{result.hit_tokens:,}",
            f"{100 * result.hit_rate:.2f} %",
            f"{result.evicted_blocks:,}",
            f"{result.seconds:.1f}",
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_json(results: Sequence[ReplayResult], path: str | Path) -> None:
    rows: list[dict[str, Any]] = [result.to_json() for result in results]
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def plot(results: Sequence[ReplayResult], path: str | Path) -> None:
    """Hit rate over pool size, a line per policy. Needs matplotlib (`pip install 'jaxcache[demo]'`)."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("a plot needs matplotlib: pip install 'jaxcache[demo]'") from error

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for policy in dict.fromkeys(result.policy for result in results):
        points = sorted((r.num_blocks, 100 * r.hit_rate) for r in results if r.policy == policy)
        axes.plot(*zip(*points), marker="o", label=policy)
    axes.set(
        xscale="log",
        xlabel=f"pool size, blocks of {results[0].block_size} tokens",
        ylabel="prompt tokens from the cache, %",
        title=results[0].trace,
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
