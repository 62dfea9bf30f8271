"""`rimuru bench`: benchmarks, one command per file."""

import typer

from rimuru_jax.cli.bench_offline import latency, throughput
from rimuru_jax.cli.bench_serve import serve

bench = typer.Typer(help="Benchmarks.", rich_markup_mode=None)


@bench.callback()
def root() -> None:
    """Benchmarks."""


for command in (latency, throughput, serve):
    bench.command()(command)
