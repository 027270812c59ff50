"""The live page in headless Chromium: what it shows once its scripts have run, and what it looks like."""

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from fastapi.responses import HTMLResponse

from tests.serve.serving import serving

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def test_the_page_is_there_and_asks_nobody_else():
    with serving() as server:
        page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install Debian's chromium to run the page test")
def test_the_page_shows_what_the_cache_does(tmp_path):
    """Two equal prompts; the page, once it has polled, shows nearly all of the second one's tokens as cached."""
    picture, body = (
        tmp_path / "page.png",
        {"prompt": "x" * 81, "max_tokens": 4, "ignore_eos": True, "temperature": 0},
    )
    with serving() as server:
        for _ in range(2):
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        server.settle()
        dom = browse(tmp_path, server.url, "--dump-dom", *TWO_SECONDS)
        browse(tmp_path, server.url, f"--screenshot={picture}", "--window-size=1000,900", *TWO_SECONDS)
    assert '<b id="rate">49.4 %</b>' in dom
    assert "<td>81</td><td>80</td><td>4</td>" in dom
    assert "<td>81</td><td>0</td><td>4</td>" in dom
    assert "width: 98.7654%" in dom
    assert '<small id="model">model</small>' in dom
    assert dom.count("<polygon") == 2
    assert re.search(r'<polyline points="[^"]*300,50\.\d+"', dom)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    if kept := os.environ.get("JAXCACHE_SCREENSHOT"):
        shutil.copy(picture, kept)


TWO_SECONDS = ("--virtual-time-budget=2000",)
"""Of the page's own time, in which it polls."""
DRIVER = """<iframe src="/"></iframe><img src="/wait"><p id="seen"></p><script>
const frame = document.querySelector("iframe");
const text = name => frame.contentDocument.getElementById(name).textContent;
frame.onload = () => {
  frame.contentDocument.getElementById("prompt").value = "PROMPT";
  setTimeout(() => frame.contentDocument.querySelector("button").click(), 1500);
  setInterval(() => {
    document.getElementById("seen").textContent = text("answer").length + " characters, " + text("usage");
  }, 200);
};
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install Debian's chromium to run the page test")
def test_the_prompt_box_sends_and_shows_what_came_from_the_cache(tmp_path):
    """A page of the test's own has the live page in a frame, fills in its form and presses its button.

    The browser prints a page once it is loaded: an image that takes its time makes this one wait for the answer.
    """

    async def wait():
        await asyncio.sleep(5)
        return HTMLResponse("")

    body = {"prompt": "y" * 41, "max_tokens": 64, "temperature": 0}
    with serving() as server:
        driver = HTMLResponse(DRIVER.replace("PROMPT", body["prompt"]))
        server.server.config.app.add_api_route("/driver", lambda: driver)
        server.server.config.app.add_api_route("/wait", wait)
        expected = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        dom = browse(tmp_path, f"{server.url}/driver", "--dump-dom")
    length = len(expected["choices"][0]["text"])
    assert f'<p id="seen">{length} characters, 40 of 41 prompt tokens from the cache</p>' in dom


def browse(tmp_path: Path, url: str, *arguments: str) -> str:
    """Open `url` and do what the arguments say. Returns what is printed."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}", *arguments, url,
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout
