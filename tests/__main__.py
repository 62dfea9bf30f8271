"""Everything that must hold before a change lands: format, lint, types, tests. `python -m tests` runs it."""

import os
import subprocess
import sys

CHECKS = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("pyright",),
    ("pytest", "-m", "not gpu", "-n", str(os.cpu_count() or 1), "--dist", "worksteal"),
)


def main() -> int:
    for check in CHECKS:
        print("+", *check, flush=True)
        if code := subprocess.run([sys.executable, "-m", *check]).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
