"""Every model family against golden logits of transformers (goldens/make_families.py), however a prompt is cut
into steps and wherever its blocks lie. All blocks hold NaN until they are written.
"""

import copy
import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcache.models.config import ModelConfig
from jaxcache.models.decoder import param_specs
from jaxcache.models.grouping import LayerKind
from jaxcache.models.loading.families import FAMILIES
from jaxcache.models.recurrent import HybridCache, state_bytes
from tests.models.steps import Runner, kv_for, one_step

DATA = Path(__file__).parent.parent / "data" / "families"
NAMES = (
    "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "mixtral", "recurrent_gemma",
)  # fmt: skip
BLOCK_SIZE, WIDTH, ROWS, TILES = 8, 6, 16, 2
BLOCKS_PER_GROUP = 20

TOLERANCE = {"float32": 3e-5, "bfloat16": 0.3}
"""Largest absolute error of a logit by dtype of weights and KV; golden logits have a mean size near 1."""
SEEN = 3e-3
"""What a wrong constant or parameter must at least change some logit by."""


class Golden:
    def __init__(self, name: str):
        with np.load(DATA / f"{name}.npz") as file:
            arrays = dict(file)
        self.hf_config = json.loads(str(arrays.pop("config")))
        self.tokens, self.logits = arrays.pop("tokens"), arrays.pop("logits")
        self.tensors = arrays
        self.config = ModelConfig.from_hf(self.hf_config)
        self.family = FAMILIES[self.hf_config["model_type"]]

    def model(self, dtype: str = "float32", **changes):
        config = dataclasses.replace(self.config, **changes)
        return self.family.from_tensors(config, self.tensors, jnp.dtype(dtype))


golden_of = functools.cache(Golden)


class Groups:
    """A model run with several block tables, each group's blocks taken from a range of its own, highest first."""

    def __init__(self, model, implementation: str | None = None, dtype: str = "float32"):
        self.config = model.config
        self.num_groups = len(model.config.layer_groups)
        self.num_blocks = 1 + BLOCKS_PER_GROUP * self.num_groups
        self.dtype = dtype
        self.runner = Runner(model, self.num_blocks, dtype, implementation, BLOCK_SIZE)

    def fresh(self) -> "Groups":
        """The same compiled functions with a pool full of NaN."""
        other = copy.copy(self)
        other.runner = copy.copy(self.runner)
        kv = kv_for(self.config, self.num_blocks, self.dtype, BLOCK_SIZE)
        other.runner.kv = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), kv)
        return other

    def tables(self, *ids: int) -> list[list[int]]:
        """Per group the blocks with these numbers in its range; 0 stays the null block."""
        return [[BLOCKS_PER_GROUP * (g + 1) + 1 - i if i else 0 for i in ids] for g in range(self.num_groups)]

    def poison(self, blocks: list[int]) -> None:
        def fill(leaf):
            return leaf.at[:, jnp.asarray(blocks)].set(jnp.nan)

        self.runner.kv = jax.tree.map(fill, self.runner.kv)

    def step(self, *chunks, **options) -> np.ndarray:
        """Logits of all rows. `chunks`: tokens, tokens computed before, and a block table per group."""
        steps = []
        for g in range(self.num_groups):
            mine = [(tokens, start, tables[g]) for tokens, start, tables in chunks]
            steps.append(one_step(mine, block_size=BLOCK_SIZE, width=WIDTH, **options))
        return self.runner(steps[0] if self.num_groups == 1 else tuple(steps))

    def chunk(self, *chunks) -> np.ndarray:
        """As `step`, in a shape that is always the same: two sequences of 16 rows, or one of less and padding."""
        total = sum(len(tokens) for tokens, _, _ in chunks)
        assert total == ROWS if len(chunks) == 2 else total < ROWS
        return self.step(*chunks, padding=ROWS - total, num_tiles=TILES)[:total]


@functools.cache
def groups_of(name: str, implementation: str | None = None) -> Groups:
    return Groups(golden_of(name).model(), implementation)


@pytest.fixture(params=NAMES)
def golden(request):
    return golden_of(request.param)


@pytest.fixture
def groups(request, golden):
    return groups_of(request.node.callspec.params["golden"]).fresh()


def check(golden: Golden, logits: np.ndarray, start: int = 0, dtype: str = "float32") -> None:
    assert logits.dtype == np.float32
    worst = np.abs(logits - golden.logits[start : start + len(logits)]).max()
    assert worst <= TOLERANCE[dtype], f"largest error {worst}"


def run(
    groups: Groups, tokens: np.ndarray, cuts: list[int], tables: list[list[int]], start: int = 0
) -> np.ndarray:
    """Logits of `tokens[start:]`, computed in chunks that end at `cuts`."""
    ends = zip([start, *cuts], [*cuts, len(tokens)])
    return np.concatenate([groups.chunk((tokens[a:b], a, tables)) for a, b in ends])


def test_prefill_in_one_piece(golden, groups):
    check(golden, groups.step((golden.tokens, 0, groups.tables(1, 2, 3, 4, 5, 6))))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
def test_the_oracle_gives_the_same(name):
    golden, groups = golden_of(name), groups_of(name, "reference").fresh()
    check(golden, groups.step((golden.tokens, 0, groups.tables(1, 2, 3, 4, 5, 6))))


def test_prefill_in_chunks(golden, groups):
    check(golden, run(groups, golden.tokens, [13, 24, 39], groups.tables(1, 2, 3, 4, 5, 6)))


def test_token_by_token(golden, groups):
    tables = groups.tables(2, 4, 6, 8, 10, 12)
    logits = [groups.step((golden.tokens[n : n + 1], n, tables)) for n in range(len(golden.tokens))]
    check(golden, np.concatenate(logits))


def test_a_cached_prefix_is_read_where_it_lies(golden, groups):
    """Two texts share 24 tokens; the second is computed from there on, beside a third that has nothing to do with
    it, whose rows are first one and then many.
    """
    tokens, prefix = golden.tokens, (9, 3, 14)
    run(groups, tokens[:29], [15, 24], groups.tables(*prefix, 5))
    second, third = groups.tables(*prefix, 2, 11, 7), groups.tables(1, 12)
    other = tokens[::-1].copy()
    first = groups.chunk((tokens[24:39], 24, second), (other[:1], 0, third))
    alone = third_alone(groups, other[:11])
    last = groups.chunk((other[1:11], 1, third), (tokens[39:], 39, second))
    check(golden, np.concatenate([first[:15], last[10:]]), start=24)
    assert np.abs(np.concatenate([first[15:], last[:10]]) - alone).max() <= TOLERANCE["float32"]


def third_alone(groups: Groups, tokens: np.ndarray) -> np.ndarray:
    alone = groups.fresh()
    return alone.chunk((tokens, 0, alone.tables(1, 2)))


def needed(kind: LayerKind, computed: int) -> range:
    """The columns of a block table that a group needs once `computed` tokens are computed."""
    end = -(-computed // BLOCK_SIZE)
    if kind.kind == "recurrent":
        return range(end - 1, end)
    return range(max(0, computed - kind.size + 1) // BLOCK_SIZE if kind.size else 0, end)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "recurrent_gemma"])
@pytest.mark.parametrize("cut", [24, 31])
def test_what_a_group_does_not_need_any_more_may_be_gone(name, cut):
    golden, groups = golden_of(name), groups_of(name).fresh()
    tables = groups.tables(1, 2, 3, 4, 5, 6)
    run(groups, golden.tokens[:cut], list(range(15, cut, 15)), tables)
    gone = []
    for layers, table in zip(groups.config.layer_groups, tables):
        kept = needed(groups.config.layer_kinds[layers[0]], cut)
        for column in range(-(-cut // BLOCK_SIZE)):
            if column not in kept:
                gone.append(table[column])
                table[column] = 0
    assert gone
    groups.poison([0, *gone])
    check(golden, run(groups, golden.tokens, [39], tables, start=cut), start=cut)


def test_every_parameter_matters(golden, groups):
    """A loader that mixed up or forgot one would be found out."""
    runner, tables = groups.runner, groups.tables(1, 2, 3, 4, 5, 6)
    params = runner.params
    flat, tree = jax.tree.flatten_with_path(params)
    for nth, (path, leaf) in enumerate(flat):
        leaves = [other for _, other in flat]
        leaves[nth] = leaf[..., ::-1] * 0.8
        runner.params = jax.tree.unflatten(tree, leaves)
        changed = np.abs(groups.step((golden.tokens, 0, tables)) - golden.logits).max()
        assert changed > SEEN, f"{jax.tree_util.keystr(path)}: {changed}"


WRONG = {
    "qwen2": [{"layer_kinds": 15}],
    "qwen3": [{"rope": {"attention_factor": 1.1}}, {"rope": {"truncate": False}}],
    "mistral": [{"layer_kinds": 17}],
    "gemma2": [{"attention_soft_cap": None}, {"sm_scale": None}, {"embed_scale": 5.6}],
    "gemma3": [{"local_rope": None}, {"rope": {"factor": 3.1}}],
    "gpt_oss": [{"experts": {"swiglu_limit": 1.6}}, {"experts": {"swiglu_alpha": 1.6}}],
    "qwen3_moe": [{"experts": {"normalize": True}}],
    "mixtral": [{"experts": {"experts_per_token": 1}}],
    "recurrent_gemma": [{"rope": {"fraction": 1.0}}],
}
"""Constants that are read from a config, each made wrong: another window, or changes to a part of the config."""


@pytest.mark.parametrize(("name", "change"), [(name, change) for name in WRONG for change in WRONG[name]], ids=str)
def test_every_constant_matters(name, change):
    golden = golden_of(name)
    (field, value), *_ = change.items()
    if field == "layer_kinds":
        value = tuple(LayerKind(k.kind, value) if k.size else k for k in golden.config.layer_kinds)
    elif isinstance(value, dict):
        value = dataclasses.replace(getattr(golden.config, field), **value)
    groups = Groups(golden.model(**{field: value})).fresh()
    logits = groups.step((golden.tokens, 0, groups.tables(1, 2, 3, 4, 5, 6)))
    assert np.abs(logits - golden.logits).max() > SEEN


@pytest.mark.parametrize("name", ["gpt_oss", "recurrent_gemma"])
def test_bfloat16(name):
    golden = golden_of(name)
    groups = Groups(golden.model("bfloat16"), dtype="bfloat16").fresh()
    logits = groups.step((golden.tokens, 0, groups.tables(1, 2, 3, 4, 5, 6)))
    check(golden, logits, dtype="bfloat16")


@pytest.mark.parametrize("name", ["gemma3", "recurrent_gemma"])
def test_a_step_copies_neither_kv_nor_states(name):
    golden = golden_of(name)
    graph, params = nnx.split(golden.model())

    def forward(params, kv, steps):
        model = nnx.merge(graph, params)
        hidden, kv = model(steps, kv)
        return model.logits(hidden), kv

    kv = kv_for(golden.config, 5000, block_size=BLOCK_SIZE)
    steps = tuple(
        one_step(
            [(golden.tokens[40:41], 40, [1, 2, 3, 4, 5, 6]), (golden.tokens[:9], 0, [7, 8])], block_size=BLOCK_SIZE
        )
        for _ in golden.config.layer_groups
    )
    compiled = jax.jit(forward, donate_argnames="kv").lower(params, kv, steps).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(kv))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 10
    for leaf in jax.tree.leaves(kv):
        shape = ",".join(map(str, leaf.shape))
        made = [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line.split("=")[-1][:200]]
        assert made, "the pool's shape should be somewhere"
        assert not [line for line in made if " copy(" in line or " copy-start(" in line]


def test_tensor_parallel_logits_are_the_same():
    golden = golden_of("gpt_oss")
    mesh = jax.make_mesh((2,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:2])
    # The vocabulary of 53 cannot be cut in two: pad it.
    padded = copy.copy(golden)
    padded.config = dataclasses.replace(golden.config, vocab_size=54)
    padded.tensors = dict(golden.tensors)
    for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
        padded.tensors[tensor] = np.pad(golden.tensors[tensor], ((0, 1), (0, 0)))
    graph, params = nnx.split(padded.model())
    specs = param_specs(golden.family, padded.config)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    groups = Groups(nnx.merge(graph, jax.device_put(params, places)))
    groups.runner.kv = jax.device_put(groups.runner.kv, NamedSharding(mesh, PartitionSpec(None, None, "tp")))
    logits = groups.step((golden.tokens, 0, groups.tables(1, 2, 3, 4, 5, 6)))
    check(golden, logits[:, :53])


class TestBidirectional:
    """A token sees those after it: whole sequences in one step, and nothing is cached."""

    golden = golden_of("gemma3_bidirectional")

    def test_two_sequences_in_one_step(self):
        groups = Groups(self.golden.model()).fresh()
        other, tables = self.golden.tokens[:11], groups.tables(0)
        second = (self.golden.tokens, 0, [table * 6 for table in tables])
        logits = groups.step((other, 0, [table * 2 for table in tables]), second, padding=3)
        check(self.golden, logits[11:56])

    def test_config_says_so(self):
        assert not self.golden.config.causal
        assert golden_of("gemma3").config.causal
        assert self.golden.config.layer_kinds[0].size == 16 // 2 + 1


def test_a_model_of_several_groups_wants_a_step_for_each():
    golden = golden_of("gemma2")
    step = one_step([(golden.tokens[:8], 0, [1])], block_size=BLOCK_SIZE)
    with pytest.raises(ValueError, match="the model has 3 groups of layers, got 1 steps"):
        golden.model()(step, kv_for(golden.config, 4, block_size=BLOCK_SIZE))


def test_recurrent_state_has_the_size_that_it_says():
    config = golden_of("recurrent_gemma").config
    cache = kv_for(config, 7, block_size=BLOCK_SIZE)
    assert isinstance(cache, HybridCache)
    assert sum(leaf.nbytes for leaf in cache.state) == 7 * state_bytes(config, jnp.float32)
    assert state_bytes(config, jnp.float32) == 2 * 24 * (3 * 4 + 4)
    assert state_bytes(golden_of("gemma3").config, jnp.float32) == 0
