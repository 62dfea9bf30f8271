"""Find the best sizes of `paged_moe` on this card and write them to `rimuru_jax/pallas/paged_moe/tuned/`.

For each number of tokens every token tile that is no more than two steps from the usual one is tried with every launch
that fits into shared memory, gate/up first, then down. All candidates are measured in turn; another than the usual
sizes is kept only where it is at least 1 % faster. Run on an idle card: `python benchmarks/tune_moe.py`.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax

from benchmarks.kernels import SHAPES, Case, Shape, Weights, measure
from rimuru_jax.pallas.paged_moe import mosaic_gpu, tuning
from rimuru_jax.pallas.paged_moe.mosaic_gpu import Config, Launch

TOKENS = [1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192]
GAIN = 0.01


def launches(tile: int, matrices: int, width: int, contracted: int) -> Iterator[Launch]:
    """Every launch of this tile that fits."""
    weights_first = tile < mosaic_gpu.TOKENS_FIRST
    for block in (64, 128, 256):
        warpgroups = block // 64 if weights_first else tile // 64
        too_wide = (
            warpgroups > 2
            if weights_first
            else matrices * block * tile > mosaic_gpu.WGMMA_COLUMNS * mosaic_gpu.TOKENS_FIRST
        )
        if width % block or too_wide:
            continue
        for depth in (64, 128, 256):
            slot = (matrices * block + tile) * depth * 2
            result = tile * min(block, 2 * mosaic_gpu.STORE) * 2
            stages = min(8, (mosaic_gpu.SHARED_MEMORY - result - 1024) // slot)
            if contracted % depth == 0 and stages >= 3:
                yield Launch(
                    weights_first=weights_first,
                    block=block,
                    depth=depth,
                    stages=stages,
                    warpgroups=warpgroups,
                    store=mosaic_gpu.STORE,
                )


def best(case: Case, weights: Weights, candidates: list[tuple[int, Config]]) -> tuple[int, Config]:
    """The fastest of some (tile, sizes), the first of them unless another is clearly faster."""
    with ThreadPoolExecutor() as threads:
        runs = list(
            threads.map(
                lambda c: case.compile(
                    weights, weights.tables, weights.contiguous, routed=True, tile=c[0], config=c[1]
                ),
                candidates,
            )
        )
    rounds = measure(runs, case.launches, 1)
    times = [statistics.median(column) for column in zip(*rounds, strict=True)]
    fastest = min(range(len(times)), key=times.__getitem__)
    if times[fastest] > times[0] * (1 - GAIN):
        fastest = 0
    print(f"{case.tokens} tokens: usual {times[0]:.1f} us, best {times[fastest]:.1f} us", candidates[fastest])
    return candidates[fastest]


def tune(shape: Shape, tokens: int, weights: Weights, multiprocessors: int) -> tuple[int, Config]:
    case = Case.random(shape, tokens, 0.0)
    usual_tile = mosaic_gpu.token_tile(tokens * shape.top_k, shape.experts)
    usual = mosaic_gpu.choose_config(usual_tile, shape.f, shape.d, multiprocessors)
    candidates = [(usual_tile, usual)]
    at = mosaic_gpu.TILES.index(usual_tile)
    for tile in mosaic_gpu.TILES[max(0, at - 2) : at + 3]:
        base = mosaic_gpu.choose_config(tile, shape.f, shape.d, multiprocessors)
        candidates += [
            (tile, dataclasses.replace(base, gate_up=g)) for g in launches(tile, 2, shape.f, shape.d)
        ]
    tile, config = best(case, weights, candidates)
    downs = [config.down, *launches(tile, 1, shape.d, shape.f)]
    return best(case, weights, [(tile, dataclasses.replace(config, down=down)) for down in downs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", help="default: the file of this card in the package")
    args = parser.parse_args()
    device = jax.devices()[0]
    entries = []
    for name in args.shape:
        shape = SHAPES[name]
        weights, sizes = Weights(shape), []
        for tokens in args.tokens:
            tile, config = tune(shape, tokens, weights, device.core_count)
            fields = {
                "up_to": tokens * shape.top_k,
                "tile": tile,
                "gate_up": dataclasses.asdict(config.gate_up),
                "down": dataclasses.asdict(config.down),
            }
            sizes.append(fields)
        experts = tuning.ExpertShape(experts=shape.experts, f=shape.f, d=shape.d, matrices=3)
        entries.append({"shape": dataclasses.asdict(experts), "sizes": sizes})
    content = {"card": device.device_kind, "jax": jax.__version__, "entries": entries}
    path = args.output or tuning.FOLDER / tuning.file_name(device.device_kind)
    with open(path, "w") as file:
        json.dump(content, file, indent=1)


if __name__ == "__main__":
    main()
