"""Adapters in the model: every family gives what the merged weights give, row by row; and what does not fit."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxcache.models.llama import Llama
from jaxcache.models.loading.peft import read_peft
from jaxcache.models.lora import AdapterWeight, LoRAAdapter, LoRAConfig, add_slots, fill_slot
from jaxcache.models.rows import NO_ROW_INPUTS, RowInputs
from tests.models.adapters import merged, random_adapter, weights_of
from tests.models.steps import kv_for, one_step

NAMES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "mixtral", "recurrent_gemma")

ATOL = 2e-4
"""f32: sums in another order than the merged weights'."""


@functools.partial(jax.jit, static_argnames="graph")
def logits_of(graph, state, step, rows):
    model = nnx.merge(graph, state)
    kv = kv_for(model.config, 6, block_size=16)
    hidden, _ = model((step,) * len(model.config.layer_groups), kv, rows=rows)
    return model.logits(hidden)


def forward(model, step, rows=NO_ROW_INPUTS):
    """Logits of every row. All layers use the same blocks, which each writes before it reads them."""
    return np.asarray(logits_of(*nnx.split(model), step, rows))


@functools.cache
def scene():
    """Two chunks of 10 rows, and one of 1."""
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 60, n).astype(np.int32), 0, [1 + nth]) for nth, n in enumerate((10, 10, 1))]


@pytest.mark.parametrize("name", NAMES)
def test_every_row_computes_what_its_merged_weights_would(name):
    family, config, arrays = weights_of(name)
    adapters = [random_adapter(arrays, seed) for seed in range(2)]
    base = family.from_tensors(config, arrays)
    model = add_slots(base, LoRAConfig(max_loras=3, max_lora_rank=4))
    fill_slot(model, 1, adapters[0])
    fill_slot(model, 3, adapters[1])
    step = one_step(scene())
    slots = np.repeat([1, 3, 0], [10, 10, 1]).astype(np.int32)
    logits = forward(model, step, RowInputs(jnp.asarray(slots)))
    plain = forward(base, step)
    for slot, adapter in ((1, adapters[0]), (3, adapters[1])):
        expected = forward(family.from_tensors(config, merged(arrays, adapter)), step)
        mine = slots == slot
        assert np.abs(expected[mine] - plain[mine]).max() > 100 * ATOL
        np.testing.assert_allclose(logits[mine], expected[mine], atol=ATOL)
    np.testing.assert_array_equal(logits[slots == 0], plain[slots == 0])


def test_a_slot_is_emptied_and_filled_again_whole():
    _, config, arrays = weights_of("llama")
    base = Llama.from_tensors(config, arrays)
    model = add_slots(base, LoRAConfig(max_loras=2, max_lora_rank=4))
    step = one_step(scene())
    rows = RowInputs(jnp.full(21, 2, jnp.int32))
    everywhere, small = random_adapter(arrays, 0, rank=4), random_adapter(arrays, 1, rank=1)
    small = LoRAAdapter({name: pair for name, pair in small.weights.items() if "layers.1.mlp" in name})
    fill_slot(model, 2, everywhere)
    fill_slot(model, 2, small)
    expected = forward(Llama.from_tensors(config, merged(arrays, small)), step)
    np.testing.assert_allclose(forward(model, step, rows), expected, atol=ATOL)
    fill_slot(model, 2, None)
    np.testing.assert_array_equal(forward(model, step, rows), forward(base, step))
    assert not jax.tree.leaves(nnx.state(base, AdapterWeight))


def test_nothing_of_another_slot_reaches_a_row():
    """Not even infinities that its weights make of this row's input."""
    _, config, arrays = weights_of("llama")
    model = add_slots(Llama.from_tensors(config, arrays), LoRAConfig(max_loras=2, max_lora_rank=4))
    wild = random_adapter(arrays, 0)
    wild = LoRAAdapter({name: (a * 1e38, b) for name, (a, b) in wild.weights.items()})
    fill_slot(model, 1, wild)
    step = one_step(scene())
    logits = forward(model, step, RowInputs(jnp.full(21, 2, jnp.int32)))
    np.testing.assert_array_equal(logits, forward(Llama.from_tensors(config, arrays), step))


def test_a_model_without_slots_is_traced_as_ever():
    """No operand and no operation more: adapters cost nothing where there are none."""
    _, config, arrays = weights_of("llama")
    model = Llama.from_tensors(config, arrays)
    step, kv = one_step(scene()), kv_for(config, 6)

    def traced(model, **options):
        graph, state = nnx.split(model)
        return str(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(step, kv, **options))(state))

    rows = RowInputs(jnp.zeros(21, jnp.int32))
    plain = traced(model)
    assert plain == traced(model, rows=RowInputs())
    assert plain.count("dot_general") + 11 == traced(add_slots(model, LoRAConfig()), rows=rows).count(
        "dot_general"
    )


def q_proj(a=(2, 36), b=(48, 2), **options):
    weights = {"model.layers.0.self_attn.q_proj": (np.ones(a, np.float32), np.ones(b, np.float32))}
    return LoRAAdapter(weights, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRAConfig(max_loras=0), "LoRAConfig.max_loras must be a positive integer, got 0"),
        (lambda: LoRAConfig(max_lora_rank=-1), "LoRAConfig.max_lora_rank must be a positive integer, got -1"),
        (lambda: LoRAAdapter({}), "needs weights for at least one projection"),
        (lambda: q_proj(scale=float("nan")), "scale must be a finite number, got nan"),
        (lambda: q_proj(b=(64, 3)), r"A must be \[rank, in\] and B \[out, rank\], got \[2, 36\] and \[64, 3\]"),
        (lambda: q_proj(a=(0, 64), b=(64, 0)), r"A must be \[rank, in\]"),
        (lambda: LoRAAdapter({"x": (np.ones((1, 2), int), np.ones((2, 1)))}), "floating point, got int64"),
        (lambda: LoRAAdapter({"x": (np.full((1, 2), np.inf), np.ones((2, 1)))}), "must be finite"),
    ],
)
def test_bad_adapters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (lambda: q_proj(a=(5, 36), b=(48, 5)), "q_proj has rank 5, but LoRAConfig.max_lora_rank is 4: raise it"),
        (
            lambda: q_proj(a=(2, 35)),
            r"q_proj takes A \[rank, 36\] and B \[48, rank\], got \[2, 35\] and \[48, 2\]",
        ),
        (
            lambda: LoRAAdapter({"model.layers.9.mlp.up_proj": (np.ones((1, 64)), np.ones((8, 1)))}),
            r"changes model.layers.9.mlp.up_proj, for which this model has no place: it takes adapters in \d "
            r"layers, at mlp.down_proj, mlp.gate_proj, mlp.up_proj, self_attn.k_proj",
        ),
    ],
)
def test_adapters_that_do_not_fit_the_model(adapter, message):
    _, config, arrays = weights_of("llama")
    model = add_slots(Llama.from_tensors(config, arrays), LoRAConfig(2, 4))
    with pytest.raises(ValueError, match=message):
        fill_slot(model, 1, adapter())


def test_a_scale_that_the_weights_cannot_hold():
    _, config, arrays = weights_of("llama")
    model = add_slots(Llama.from_tensors(config, arrays, jnp.float16), LoRAConfig(2, 4))
    with pytest.raises(ValueError, match=r"q_proj, scaled by 1000000\.0, has values that float16 does not hold"):
        fill_slot(model, 1, q_proj(scale=1e6))


def test_experts_take_no_adapters():
    family, config, arrays = weights_of("mixtral")
    model = add_slots(family.from_tensors(config, arrays), LoRAConfig(2, 4))
    name = "model.layers.0.block_sparse_moe.experts.0.w1"
    with pytest.raises(ValueError, match=rf"changes {name}, for which this model has no place"):
        fill_slot(model, 1, LoRAAdapter({name: (np.ones((1, 8)), np.ones((8, 1)))}))


def save_peft(folder, adapter, **config):
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, (a, b) in adapter.weights.items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("rank_stabilised", "scale"), [(False, 2.0), (True, 4.0)])
def test_a_peft_folder(tmp_path, rank_stabilised, scale):
    _, _, arrays = weights_of("llama")
    adapter = random_adapter(arrays, 0, rank=4)
    read = read_peft(save_peft(tmp_path / "x", adapter, use_rslora=rank_stabilised))
    assert read.scale == scale
    assert read.rank == 4
    assert read.weights.keys() == adapter.weights.keys()
    for name, (a, b) in adapter.weights.items():
        np.testing.assert_array_equal(read.weights[name][0], a)
        np.testing.assert_array_equal(read.weights[name][1], b)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "adapter of peft_type 'IA3': only LORA is supported"),
        ({"use_dora": True}, "an adapter with use_dora = True is not supported"),
        ({"bias": "all"}, "an adapter with bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = {'q_proj': 8} is not supported"),
        ({"r": 0}, "the adapter's r must be a positive integer, got 0"),
        ({"lora_alpha": "8"}, "the adapter's lora_alpha must be a number, got '8'"),
    ],
)
def test_peft_settings_that_would_change_the_answer_are_refused(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        read_peft(save_peft(tmp_path / "x", q_proj(), **config))


def test_peft_folders_that_are_not_whole(tmp_path):
    with pytest.raises(ValueError, match=r"has no adapter_config.json"):
        read_peft(tmp_path)
    folder = save_peft(tmp_path / "x", q_proj())
    weights = folder / "adapter_model.safetensors"
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{prefix}.lora_A.weight": np.ones((2, 64), np.float32)}, weights)
    with pytest.raises(ValueError, match="q_proj has lora_A but not the other half"):
        read_peft(folder)
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((2, 64), np.float32)}, weights)
    with pytest.raises(ValueError, match="lora_embedding_A is no LoRA weight of a decoder's projection"):
        read_peft(folder)
    save_file({f"{prefix}.lora_A.weight": np.ones((2, 64), np.int8)}, weights)
    with pytest.raises(ValueError, match="is I8; supported are F32"):
        read_peft(folder)
    weights.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is no safetensors file"):
        read_peft(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="safetensors: save the adapter with safe_serialization=True"):
        read_peft(folder)
