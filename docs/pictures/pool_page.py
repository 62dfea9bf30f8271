"""Pictures of the pool page: a burst of requests for the embedded default model on a CPU, and the lull after it.

    uv run --extra demo --extra server python docs/pictures/pool_page.py

Wants chromium; takes some minutes.
"""

import asyncio
import shutil
import subprocess
import threading
from pathlib import Path

import httpx

from rimuru_jax import Engine
from rimuru_jax.server.config import ServerConfig
from rimuru_jax.server.serve import listen, serve_until

HERE = Path(__file__).parent
PROMPT = "Tell me everything you know about rivers, mountains and the sea. " * 12
REQUESTS = 12


def ask(url: str, max_tokens: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.8}
    httpx.post(f"{url}/v1/completions", json=body, timeout=None).raise_for_status()


def photograph(url: str, name: str, samples: int) -> subprocess.Popen[bytes]:
    """A browser that looks once a second until it has so many samples.

    The seconds are its own: its clock stands still while it waits for an answer, which comes between two steps. So it
    sees about one sample a step.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no browser here (Debian: apt install chromium)")
    return subprocess.Popen(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1180,960",
            f"--virtual-time-budget={1000 * samples}", f"--screenshot={HERE / name}", url,
        ],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def burst_and_lull(url: str) -> None:
    ask(url, 2)  # compiles
    browsers = [photograph(url, "pool_page_burst.png", 60), photograph(url, "pool_page_lull.png", 190)]
    burst = [threading.Thread(target=ask, args=(url, 30 + 6 * i)) for i in range(REQUESTS)]
    for request in burst:
        request.start()
    for request in burst:
        request.join()
    while any(browser.poll() is None for browser in browsers):
        ask(url, 40)


def main() -> None:
    engine = Engine(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024)
    socket = listen("127.0.0.1", 0)

    async def serve() -> None:
        stop, ready = asyncio.Event(), threading.Event()
        config = ServerConfig(served_model_name="SmolLM2-135M-Instruct")
        server = asyncio.create_task(serve_until(stop, engine, config, socket, 0.0, ready.set))
        await asyncio.to_thread(ready.wait)
        try:
            await asyncio.to_thread(burst_and_lull, f"http://127.0.0.1:{socket.getsockname()[1]}")
        finally:
            stop.set()
            await server

    asyncio.run(serve())


if __name__ == "__main__":
    main()
