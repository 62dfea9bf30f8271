"""A checkpoint to convert, and where to."""

from pathlib import Path

import pytest

from rimuru_jax.models import packed
from tests.models.packed_cases import PAGE_BYTES, TOKENIZER
from tests.models.tiny_checkpoints import write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny sharded Qwen3-MoE with tokenizer files."""
    folder = tmp_path / "source"
    write_checkpoint(folder, "qwen3_moe", shards=2)
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("not part of the model")
    return folder


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where to convert to, in batches of ten pages instead of all at once."""
    monkeypatch.setattr(packed, "_BATCH_BYTES", 10 * PAGE_BYTES)
    return tmp_path / "target"
