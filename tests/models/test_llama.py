"""Llama against golden logits of transformers (goldens/make_llama.py), however the prompt is cut into steps."""

import copy
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcache.models.config import ModelConfig
from jaxcache.models.llama import Llama, param_specs
from tests.models.steps import Runner, kv_for, one_step

DATA = Path(__file__).parent.parent / "data"
VARIANTS = ("plain", "llama3", "linear")
BLOCKS = [9, 8, 2, 7, 4]

TOLERANCE = {
    ("float32", "float32"): 2e-5,
    ("float32", "int8"): 0.15,
    ("bfloat16", "bfloat16"): 0.3,
}
"""Largest absolute error of a logit by dtype of weights and KV; golden logits have a mean size near 1."""


class Golden:
    def __init__(self, name: str):
        with np.load(DATA / f"llama_{name}.npz") as file:
            arrays = dict(file)
        self.hf_config = json.loads(str(arrays.pop("config")))
        self.tokens, self.rows, self.logits = (arrays.pop(key) for key in ("tokens", "rows", "logits"))
        self.tensors = arrays
        self.config = ModelConfig.from_hf(self.hf_config)
        self.runners: dict[tuple[str, str, str | None], Runner] = {}

    def model(self, dtype: str = "float32") -> Llama:
        return Llama.from_tensors(self.config, self.tensors, jnp.dtype(dtype))


@pytest.fixture(scope="module", params=VARIANTS)
def golden(request):
    return Golden(request.param)


def run(golden: Golden, cuts: list[int], dtype="float32", kv_dtype="float32", implementation=None) -> np.ndarray:
    """Logits of all rows, the prompt computed in chunks that end at `cuts`."""
    key = (dtype, kv_dtype, implementation)
    if key not in golden.runners:
        golden.runners[key] = Runner(golden.model(dtype), 10, kv_dtype=kv_dtype, implementation=implementation)
    runner = golden.runners[key]
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(golden.tokens)]):
        parts.append(runner(one_step([(golden.tokens[start:end], start, BLOCKS)])))
    return np.concatenate(parts)


def check(golden: Golden, logits: np.ndarray, dtype="float32", kv_dtype="float32") -> None:
    assert logits.dtype == np.float32
    worst = np.abs(logits[golden.rows] - golden.logits).max()
    assert worst <= TOLERANCE[dtype, kv_dtype], f"largest error {worst}"


@pytest.mark.parametrize("implementation", ["reference", None])
def test_prefill_in_one_piece(golden, implementation):
    check(golden, run(golden, [], implementation=implementation))


def test_prefill_in_chunks(golden):
    check(golden, run(golden, [24, 48]))


def test_token_by_token(golden):
    check(golden, run(golden, list(range(1, len(golden.tokens)))))


@pytest.mark.parametrize("dtypes", [("float32", "int8"), ("bfloat16", "bfloat16")], ids="-".join)
def test_narrow_dtypes(golden, dtypes):
    check(golden, run(golden, [36], *dtypes), *dtypes)


def test_golden_logits_are_not_blind(golden):
    """A model that has one small thing wrong must miss them by far more than the tolerance."""
    rope = dataclasses.replace(golden.config.rope, theta=golden.config.rope.theta * 1.2)
    wrong = copy.copy(golden)
    wrong.config, wrong.runners = dataclasses.replace(golden.config, rope=rope), {}
    error = np.abs(run(wrong, [])[golden.rows] - golden.logits).max()
    assert error > 100 * TOLERANCE["float32", "float32"]


def test_sequences_in_one_step_do_not_see_each_other():
    golden = Golden("plain")
    runner = Runner(golden.model(), num_blocks=20)
    other = golden.tokens[::-1].copy()
    runner(one_step([(other[:40], 0, [11, 12, 13]), (golden.tokens[:30], 0, BLOCKS)], padding=6))
    step = one_step([(other[40:41], 40, [11, 12, 13]), (golden.tokens[30:], 30, BLOCKS)], padding=3)
    logits = runner(step)
    assert np.isfinite(logits).all()
    rows = golden.rows >= 30
    worst = np.abs(logits[1:][golden.rows[rows] - 30] - golden.logits[rows]).max()
    assert worst <= TOLERANCE["float32", "float32"]


def test_shared_prefix_blocks_are_read_not_recomputed():
    golden = Golden("plain")
    runner = Runner(golden.model(), num_blocks=20)
    runner(one_step([(golden.tokens[:48], 0, BLOCKS[:3])]))
    logits = runner(one_step([(golden.tokens[48:], 48, [*BLOCKS[:3], 15, 14])]))
    rows = golden.rows >= 48
    worst = np.abs(logits[golden.rows[rows] - 48] - golden.logits[rows]).max()
    assert worst <= TOLERANCE["float32", "float32"]


def hlo_of_decode(num_blocks: int, donate: bool = True):
    golden = Golden("plain")
    graph, params = nnx.split(golden.model())

    def forward(params, kv, step):
        model = nnx.merge(graph, params)
        hidden, kv = model(step, kv)
        return model.logits(hidden), kv

    step = one_step([(golden.tokens[40:41], 40, BLOCKS), (golden.tokens[:30], 0, [5, 6])])
    kv = kv_for(golden.config, num_blocks)
    jitted = jax.jit(forward, donate_argnums=(1,) if donate else ())
    return jitted.lower(params, kv, step).compile(), kv


@pytest.mark.usefixtures("optimized_programs")
def test_step_makes_no_copy_of_the_pool():
    """Time must not grow with the pool: nothing of its size is made, and the donated array is the returned one."""
    compiled, kv = hlo_of_decode(5000)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= kv.data.nbytes
    assert memory.temp_size_in_bytes < kv.data.nbytes / 10
    shape = ",".join(map(str, kv.data.shape))
    made = [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line.split("=")[-1][:200]]
    assert made, "the pool's shape should be somewhere"
    assert not [line for line in made if " copy(" in line or " copy-start(" in line]


def test_copy_of_the_pool_would_be_seen():
    compiled, kv = hlo_of_decode(5000, donate=False)
    assert compiled.memory_analysis().alias_size_in_bytes < kv.data.nbytes
    assert " copy(" in compiled.as_text()


def test_tensor_parallel_logits_are_the_same():
    golden = Golden("plain")
    mesh = jax.make_mesh((2,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:2])
    # The vocabulary of 61 cannot be cut in two: pad it.
    tensors = dict(golden.tensors)
    name = "model.embed_tokens.weight"
    tensors[name] = np.pad(tensors[name], ((0, 1), (0, 0)))
    config = ModelConfig.from_hf(golden.hf_config | {"vocab_size": 62})
    model = Llama.from_tensors(config, tensors)
    graph, params = nnx.split(model)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config))
    runner = Runner(nnx.merge(graph, jax.device_put(params, places)), num_blocks=10)
    runner.kv = jax.device_put(runner.kv, NamedSharding(mesh, PartitionSpec(None, None, "tp")))
    logits = runner(one_step([(golden.tokens, 0, BLOCKS)]))
    check(golden, logits[:, :61])


class TestFromTensors:
    def load(self, **changes):
        golden = Golden("llama3")
        tensors = {name: array for name, array in (golden.tensors | changes).items() if array is not None}
        return Llama.from_tensors(golden.config, tensors)

    def test_missing(self):
        with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
            self.load(**{"model.layers.1.mlp.up_proj.weight": None})

    def test_unexpected(self):
        with pytest.raises(ValueError, match=r"does not explain: model\.layers\.0\.self_attn\.q_norm\.weight"):
            self.load(**{"model.layers.0.self_attn.q_norm.weight": np.ones(8)})

    def test_wrong_shape(self):
        with pytest.raises(
            ValueError, match=r"q_proj\.weight has shape \(36, 36\), but the config says \(48, 36\)"
        ):
            self.load(**{"model.layers.2.self_attn.q_proj.weight": np.ones((36, 36), np.float32)})

    def test_derived_buffers_are_passed_over(self):
        self.load(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)})

    def test_tied_head_may_be_stored_twice_but_not_differ(self):
        golden = Golden("plain")
        embedding = golden.tensors["model.embed_tokens.weight"]
        Llama.from_tensors(golden.config, golden.tensors | {"lm_head.weight": embedding})
        with pytest.raises(ValueError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
            Llama.from_tensors(golden.config, golden.tensors | {"lm_head.weight": embedding + 1})


class TestConfig:
    hf_config = Golden("llama3").hf_config

    def test_older_spelling_of_rope(self):
        older = {key: value for key, value in self.hf_config.items() if key != "rope_parameters"}
        scaling = dict(self.hf_config["rope_parameters"])
        older |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
        assert ModelConfig.from_hf(older) == ModelConfig.from_hf(self.hf_config)

    def test_head_dim_and_kv_heads_follow_from_the_rest(self):
        config = ModelConfig.from_hf(self.hf_config | {"head_dim": None, "num_key_value_heads": None})
        assert (config.head_dim, config.num_kv_heads) == (6, 6)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported: only llama"),
            ({"vocab_size": None}, "must have vocab_size"),
            ({"num_hidden_layers": 0}, "num_layers must be a positive integer, got 0"),
            ({"hidden_size": "36"}, "hidden_size must be a positive integer, got '36'"),
            ({"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads evenly"),
            ({"head_dim": 7}, "head_dim must be even for rotary embeddings, got 7"),
            (
                {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5},
                "hidden_size 36 is no multiple of num_attention_heads 5",
            ),
            ({"hidden_act": "relu2"}, "activation 'relu2' is not one of gelu"),
            ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
            ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
            ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "rope factor must be a positive number"),
            ({"rms_norm_eps": "x"}, "norm_eps must be a positive number, got 'x'"),
        ],
    )
    def test_message(self, changes, message):
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf(self.hf_config | changes)
