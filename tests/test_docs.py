"""The guide's code runs as it stands, from top to bottom; what it asserts about itself compares with plain numpy."""

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[1] / "docs/research.md"


def test_the_guide_for_researchers_runs():
    text, names = GUIDE.read_text(), dict[str, Any](__name__="guide")
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) > 5
    for block in blocks:
        lines_before = text[: block.start(1)].count("\n")  # so that a traceback names the line of the guide
        exec(compile("\n" * lines_before + block[1], str(GUIDE), "exec"), names)
    assert len(names["found"]) == 39 and names["delta_engine"].experts.absent_experts == 2 * 12
