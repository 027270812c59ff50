"""Block hashes against recorded values of the reference."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.core.hash_index import HashIndex
from jaxcache.core.hashing import (
    FIXED_ROOT,
    HASH_FUNCTIONS,
    BlockHasher,
    ExtraKeys,
    MultiModalFeature,
    block_hash_with_group_id,
    content_identifier,
    external_block_hash,
    generate_block_hash_extra_keys,
    get_hash_function,
    get_request_block_hasher,
    hash_block_tokens,
    root_hash,
)
from jaxcache.core.radix_index import RadixIndex
from jaxcache.core.request import Request

pytestmark = pytest.mark.core
RECORDED = json.loads(gzip.decompress((Path(__file__).parents[1] / "data/hashes.json.gz").read_bytes()))
FIXED = bytes.fromhex(RECORDED["fixed_none_hash"])
GROUPS = sorted({(v["algo"], v["none_hash"], v["block_size"]) for v in RECORDED["vectors"]})


def make_request(vector: dict, hasher: BlockHasher, tokens: list[int]) -> Request:
    spec = vector["extras_spec"]
    return Request(
        "r",
        tokens,
        adapter=spec.get("lora_name", "my-lora" if spec.get("lora") else None),
        features=[MultiModalFeature(*feature) for feature in spec.get("mm", [])],
        cache_salt=spec.get("salt"),
        block_hasher=hasher,
    )


@pytest.mark.parametrize(("algorithm", "root", "block_size"), GROUPS)
def test_every_recorded_hash(algorithm, root, block_size):
    function = get_hash_function(algorithm)
    hasher = BlockHasher(block_size, function, FIXED if root == "fixed" else root_hash(algorithm, "0"))
    vectors = [
        v
        for v in RECORDED["vectors"]
        if (v["algo"], v["none_hash"], v["block_size"]) == (algorithm, root, block_size)
    ]
    assert vectors
    for vector in vectors:
        tokens = RECORDED["about"]["seqs"][vector["seq"]]
        request = make_request(vector, hasher, tokens)
        assert [h.hex() for h in request.block_hashes] == vector["hashes"], vector["extras"]
        keys = [k and [list(x) if isinstance(x, tuple) else x for x in k.flat()] for k in request.block_extra_keys]
        assert keys == vector["extra_keys_per_block"], vector["extras"]

        known = max([len(tokens) // 2, *(offset + n for _, offset, n in vector["extras_spec"].get("mm", []))])
        grown = make_request(vector, hasher, tokens[:known])
        for token in tokens[known:]:
            grown.append_output_token_ids(token)
        assert grown.block_hashes == request.block_hashes


def test_the_recording_is_whole():
    assert sum(len(v["hashes"]) for v in RECORDED["vectors"]) == 3144


@pytest.mark.parametrize("algorithm", HASH_FUNCTIONS)
def test_root_from_a_seed(algorithm, monkeypatch):
    for seed, roots in RECORDED["none_hash_by_seed"].items():
        seed = seed[1:-1]
        assert root_hash(algorithm, seed).hex() == roots[algorithm]
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert root_hash(algorithm).hex() == roots[algorithm]
        assert root_hash(algorithm, "another") != root_hash(algorithm)


def test_root_without_a_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert root_hash("sha256") == root_hash("sha256_cbor") == FIXED_ROOT
    assert root_hash("xxhash") != root_hash("xxhash")
    assert len(root_hash("xxhash")) == 32


@pytest.mark.parametrize("sample", RECORDED["serialised_samples"], ids=lambda s: s["name"])
def test_serialised_bytes(sample):
    import cbor2

    from jaxcache.core import hashing

    value = eval(sample["repr"])
    assert hashing._pickled(value).hex() == sample["pickle5_hex"]
    assert cbor2.dumps(value, canonical=True).hex() == sample["cbor_hex"]


def test_prompt_embeddings():
    recorded = RECORDED["prompt_embeds"]
    embeds = np.arange(80, dtype=np.float32).reshape(40, 2)
    hasher = BlockHasher(4, get_hash_function("sha256"), FIXED)
    request = Request("r", prompt_embeds=embeds, block_hasher=hasher)
    assert [h.hex() for h in request.block_hashes] == recorded["hashes"]
    assert request.block_extra_keys[0].embeds.hex() == recorded["extra_key_block0_hex"]
    changed = Request("r", prompt_embeds=embeds + np.eye(40, 2, -20, np.float32), block_hasher=hasher)
    assert changed.block_hashes[:5] == request.block_hashes[:5]
    assert changed.block_hashes[5] != request.block_hashes[5]


def test_group_keys_and_external_ids():
    for row in RECORDED["group_id"]:
        assert block_hash_with_group_id(bytes.fromhex(row["hash"]), row["group"]).hex() == row["key"]
    for row in RECORDED["external_int_hash"]:
        assert external_block_hash(bytes.fromhex(row["hash"])) == int(row["int64_low_be"])


@pytest.mark.parametrize("algorithm", HASH_FUNCTIONS)
def test_hashes_depend_on_values_and_not_on_objects(algorithm):
    name = "shared-object"
    copy = "".join(list(name))
    assert name is not copy
    hasher = get_request_block_hasher(4, algorithm, "0")
    same = Request("a", range(8), adapter=name, cache_salt=name, block_hasher=hasher)
    distinct = Request("b", range(8), adapter=name, cache_salt=copy, block_hasher=hasher)
    assert same.block_hashes == distinct.block_hashes
    twice = [MultiModalFeature(name, 0, 2), MultiModalFeature(name, 2, 2)]
    copies = [MultiModalFeature(name, 0, 2), MultiModalFeature(copy, 2, 2)]
    hashes = [Request("c", range(8), features=f, block_hasher=hasher).block_hashes for f in (twice, copies)]
    assert hashes[0] == hashes[1]


def hashes_of_another_process(pythonhashseed: str | None, hash_seed: str | None) -> dict[str, str]:
    """By algorithm, the last hash of a request with a salt."""
    code = (
        "import json\n"
        "from jaxcache.core.request import Request\n"
        "from jaxcache.core.hashing import HASH_FUNCTIONS, get_request_block_hasher\n"
        f"hashers = {{name: get_request_block_hasher(4, name, {hash_seed!r}) for name in HASH_FUNCTIONS}}\n"
        "print(json.dumps({name: Request('r', range(8), cache_salt='s', block_hasher=h).block_hashes[-1].hex()\n"
        "                  for name, h in hashers.items()}))"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    env |= {"PYTHONHASHSEED": pythonhashseed} if pythonhashseed else {}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_processes_agree_whatever_pythonhashseed_does_to_hash():
    answers = [hashes_of_another_process(value, "seed") for value in (None, "0", "1")]
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0].values())) == len(HASH_FUNCTIONS)


def test_without_a_seed_the_sha256_kinds_agree_and_the_others_do_not(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    there = hashes_of_another_process(None, None)
    for algorithm in HASH_FUNCTIONS:
        hasher = get_request_block_hasher(4, algorithm)
        here = Request("r", range(8), cache_salt="s", block_hasher=hasher).block_hashes[-1].hex()
        assert (here == there[algorithm]) == algorithm.startswith("sha256")


@pytest.mark.parametrize("index", [HashIndex, RadixIndex])
def test_a_coarse_block_is_named_by_the_last_fine_hash_in_it(index):
    """Hashes of 4 tokens, blocks of 12."""
    wanted = [bytes.fromhex(h) for h in RECORDED["coarse_view_4_to_12"]["hashes"]]
    (vector,) = [v for v in RECORDED["vectors"] if wanted[0].hex() in v["hashes"] and v["extras"] == "none"]
    hasher = BlockHasher(4, get_hash_function(vector["algo"]), FIXED)
    request = Request("r", RECORDED["about"]["seqs"][vector["seq"]], block_hasher=hasher)
    names = index(10, [12], 4, None)
    names.insert(request, 0, 0, np.arange(1, 1 + len(wanted), dtype=np.int32), 0)
    assert list(names.keys()) == [block_hash_with_group_id(h, 0) for h in wanted]


@pytest.mark.parametrize("block_size", [0, -4, True, 2.0])
def test_a_hasher_needs_a_block_size(block_size):
    with pytest.raises(ValueError, match=f"block_size must be a positive integer, got {block_size!r}"):
        get_request_block_hasher(block_size)


def test_no_two_of_many_similar_blocks_share_a_hash():
    for algorithm in HASH_FUNCTIONS:
        function = get_hash_function(algorithm)
        blocks = [(a, b, 1, 2) for a in range(200) for b in range(50)]
        keys = {hash_block_tokens(function, FIXED, block) for block in blocks}
        keys |= {hash_block_tokens(function, FIXED, (1, 2, 3, 4), extra) for extra in (None, (), ("",), ("a",))}
        assert len(keys) == len(blocks) + 4


def test_features_of_a_block_and_the_next_one():
    """An image of [0, 4) belongs to block 0 alone, one of [2, 11) to blocks 0, 1 and 2."""
    request = Request("r", range(16), features=[MultiModalFeature("a", 0, 4), MultiModalFeature("b", 6, 5)])
    keys, upcoming = generate_block_hash_extra_keys(request, 0, 4)
    assert (keys.features, upcoming) == ((("a", 0),), 1)
    keys, upcoming = generate_block_hash_extra_keys(request, 4, 8, upcoming)
    assert (keys.features, upcoming) == ((("b", 2),), 1)
    keys, upcoming = generate_block_hash_extra_keys(request, 8, 12, upcoming)
    assert (keys.features, upcoming) == ((("b", -2),), 2)
    assert generate_block_hash_extra_keys(request, 12, 16, upcoming) == (None, 2)
    assert generate_block_hash_extra_keys(request, 0, 16) == (ExtraKeys(None, (("a", 0), ("b", 6)), None, None), 2)


def test_unknown_algorithm():
    with pytest.raises(
        ValueError, match="unknown prefix_caching_hash_algo 'md5': choose one of sha256, sha256_cbor"
    ):
        get_hash_function("md5")
    with pytest.raises(ValueError, match=r"hash_seed must be a string, got 0: write hash_seed='0'"):
        root_hash("sha256", 0)


def test_without_a_hasher_nothing_is_hashed():
    request = Request("r", range(64))
    request.append_output_token_ids(list(range(16)))
    assert request.block_hashes == []


def test_contents_are_told_apart_by_shape_dtype_and_kind():
    """CVE-2025-46722 and its kin: equal bytes of another shape, dtype, mode or palette are other contents."""
    pixels = np.arange(4500, dtype=np.uint8)
    floats = np.arange(24, dtype=np.float32).reshape(6, 4)
    contents = [
        (pixels.reshape(30, 150), ""),
        (pixels.reshape(150, 30), ""),
        (pixels, ""),
        (pixels.reshape(30, 150), "P;palette-1"),
        (pixels.reshape(30, 150), "P;palette-2"),
        (floats, ""),
        (floats.view(np.uint8), ""),
        (floats.view(np.uint8).reshape(6, 4, 4), ""),
        (floats.view(">f4"), ""),
        (floats.view(np.int32), ""),
        (floats.view(np.float16), ""),
        (np.asarray(jnp.zeros((6, 8), jnp.bfloat16)), ""),
        (np.zeros((6, 8), np.float16), ""),
        (np.zeros((), np.uint8), ""),
        (np.zeros((0, 3), np.uint8), ""),
        (np.zeros((3, 0), np.uint8), ""),
    ]
    names = [content_identifier(content, kind) for content, kind in contents]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {64}
    assert names[0] == content_identifier(pixels.reshape(30, 150).copy(order="F"))
    with pytest.raises(ValueError, match="content must be an array of numbers, got one of object"):
        content_identifier(np.array(["x", None]))
    with pytest.raises(ValueError, match="kind must be a string, got None"):
        content_identifier(pixels, None)


def test_many_like_contents_have_names_of_their_own():
    names = {content_identifier(np.full((2, 2), nth, np.int32)) for nth in range(20_000)}
    assert len(names) == 20_000
