"""The page at `/` in a real browser, while requests run."""

import shutil
import subprocess
import threading

import httpx
import pytest

from rimuru_jax import Engine
from rimuru_jax.models.hybrid import random_model
from tests.server.running import running
from tests.server.test_flow import MODEL, post

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no browser here (Debian: apt install chromium)")
def test_the_page_shows_the_pool():
    assert BROWSER
    one = Engine(
        random_model(MODEL, "float32"),
        dtype="float32",
        page_pool_bytes=1 << 19,
        max_model_len=256,
        max_num_seqs=2,
    )
    with running(one) as url:
        assert httpx.get(url).headers["content-type"] == "text/html; charset=utf-8"
        load = [
            threading.Thread(
                target=post, args=(url,), kwargs={"prompt": [i + 1], "max_tokens": 100, "ignore_eos": True}
            )
            for i in range(4)
        ]
        for thread in load:
            thread.start()
        # The browser's clock runs ahead as fast as the page lets it: five seconds of polling.
        dumped = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom", url],
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout  # fmt: skip
        for thread in load:
            thread.join()
    assert "live, " in dumped and 'class="failed"' not in dumped
    pool = one.plan.layout
    for kind in (*[placed.kind.name for placed in pool.kinds], "free", "pending"):
        assert f"</i>{kind} " in dumped
    assert "admitted" in dumped and "experts resident" in dumped


def test_the_page_needs_nothing_from_elsewhere():
    from rimuru_jax.server import app

    text = app._PAGE.read_text()
    for outside in ("http://", "https://", "import ", "src=", "href=", "url("):
        assert outside not in text
