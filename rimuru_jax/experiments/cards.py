"""GPUs as a few numbers: how much memory they have, and how fast they read, copy and multiply."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the cost model knows of a GPU. Rates are what programs reach, not what data sheets promise."""

    name: str
    memory_bytes: int
    memory_rate: float
    """Bytes per second, read and written, of a long copy."""
    host_rate: float
    """Bytes per second from page-locked host memory."""
    product_rate: float
    """Operations per second of large bfloat16 products that accumulate in float32."""
    layer_seconds: float
    """What a layer takes beside memory and products: launches, and the starts and ends of kernels."""
    step_seconds: float
    """What a step takes beside its layers."""


def _published(
    name: str, gigabytes: float, terabytes: float, teraflops: float, pcie: float
) -> Card:  # fmt: skip
    """A card by its data sheet, of which programs reach about as much as they do on the H200."""
    return Card(
        name=name,
        memory_bytes=int(gigabytes * 2**30),
        memory_rate=terabytes * 1e12 * 0.88,
        host_rate=pcie * 1e9 * 0.79,
        product_rate=teraflops * 1e12 * 0.55,
        layer_seconds=40e-6,
        step_seconds=300e-6,
    )


CARDS = {
    card.name: card
    for card in (
        # Measured: benchmarks/results/kernels.md. A copy runs at 4.2 of 4.8 TB/s, the link at 50 of 63 GB/s, the products
        # of the routed experts at 0.5 to 0.6 of 989 TFLOP/s.
        _published("h200", 139, 4.8, 989, 63),
        _published("h100", 79, 3.35, 989, 63),
        _published("a100-80g", 79, 2.04, 312, 31.5),
        _published("l40s", 44, 0.864, 362, 31.5),
        _published("rtx-6000-pro", 95, 1.79, 503, 63),
        _published("rtx-5090", 31.5, 1.79, 209, 63),
        _published("rtx-4090", 23.5, 1.008, 165, 31.5),
    )
}
