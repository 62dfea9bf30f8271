"""Imports go one way, and decisions are made without a device."""

import ast
import subprocess
import sys
from pathlib import Path

import rimuru_jax

PACKAGE = Path(rimuru_jax.__file__).parent

# A module may import modules of its own layer and of those before it.
LAYERS = (
    ("host", "sampling_params", "outputs", "chat_template"),
    ("config", "array_types", "tokenizer", "generation_config", "structural_tag", "structured_output"),
    ("cuda_driver", "host_memory"),
    ("pallas",),
    ("models",),
    (
        "compiled_steps",
        "programs",
        "sampling",
        "sampling_table",
        "sampler",
        "serving_loop",
        "memory_budget",
        "step_costs",
    ),
    ("request_state", "prompt_logprobs", "controller", "start_up"),
    ("engine",),
    ("server", "bench"),
    ("experiments",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[str]:
    """Full names of everything imported when the module is, or for its types."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} imports relatively, which these rules do not see"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if parts(path) not in (("__init__",), ("__main__",))]


def test_every_module_has_a_layer():
    assert {parts(path)[0] for path in modules()} == set(RANK)


def test_imports_go_down():
    wrong = []
    for path in modules():
        rank = RANK[parts(path)[0]]
        for name in imported(path):
            package, *rest = name.split(".")
            if package == "rimuru_jax" and rest and RANK.get(rest[0], -1) > rank:
                wrong.append(f"{'.'.join(parts(path))} imports {name}")
    assert not wrong


def test_the_host_imports_neither_jax_nor_models():
    for path in (PACKAGE / "host").glob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] not in ("jax", "jaxlib", "flax"), path
            assert not name.startswith(("rimuru_jax.models", "rimuru_jax.pallas")), path


def test_torch_is_never_imported():
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"torch", "transformers", "triton"}, path


def test_planning_needs_no_jax():
    code = "import sys, rimuru_jax.host.scheduler, rimuru_jax.models.registry; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
