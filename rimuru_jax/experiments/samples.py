"""How the samples in `data/` were made from what others published.

python -m rimuru_jax.experiments.samples AzureLLMInferenceTrace_code.csv --start 180 --seconds 780 > azure_code_2023.csv
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path


def azure_window(lines: Iterable[str], start: float, seconds: float) -> Iterator[str]:
    """Lines of a trace in our form, of the requests of Azure's 2023 traces (TIMESTAMP, ContextTokens, GeneratedTokens)
    that came within `seconds` seconds from `start` seconds after the first; times count from the first of them.

    Raises ValueError for another kind of file, and when there are none.
    """
    yield "arrival_s,input_tokens,output_tokens"
    origin = first = None
    for row in csv.DictReader(lines):
        try:
            # Seven digits of a second are one more than Python reads.
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            inputs, outputs = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"wanted a CSV with TIMESTAMP, ContextTokens and GeneratedTokens, got {row}"
            ) from error
        origin = time if origin is None else origin
        if start <= (time - origin).total_seconds() < start + seconds:
            first = time if first is None else first
            yield f"{(time - first).total_seconds():.3f},{inputs},{outputs}"
    if first is None:
        raise ValueError(f"no request came from second {start:g} to {start + seconds:g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="CSV of github.com/Azure/AzurePublicDataset")
    parser.add_argument("--start", type=float, default=0.0, help="seconds after the first request")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    try:
        with args.trace.open(newline="") as lines:
            sys.stdout.writelines(f"{line}\n" for line in azure_window(lines, args.start, args.seconds))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
