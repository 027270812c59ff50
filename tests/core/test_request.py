import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.request import Request, RequestStatus, pack_token_ids

pytestmark = pytest.mark.core
IDS = [0, 1, 7, 70_000]


@pytest.mark.parametrize(
    "container",
    [
        IDS,
        tuple(IDS),
        iter(IDS),
        np.array(IDS),
        np.array(IDS, np.uint32),
        [np.int32(i) for i in IDS],
        jnp.array(IDS),
    ],
    ids=["list", "tuple", "iterator", "int64", "uint32", "numpy scalars", "jax"],
)
def test_integer_containers_give_the_same_tokens_and_hashes(container):
    hasher = get_request_block_hasher(4, "sha256", "0")
    request = Request("r", container, block_hasher=hasher)
    assert request.prompt_token_ids == IDS
    assert request.block_hashes == Request("s", IDS, block_hasher=hasher).block_hashes


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1, True, 2], "prompt token 1 is True: token ids must be integers, not bools"),
        ([1, np.bool_(False)], "prompt token 1 is .*False.*bools|integers"),
        ([1, 2.0], r"prompt token 1 is 2.0: token ids must be integers in \[0, 100\)"),
        (["a"], "prompt token 0 is 'a': token ids must be integers"),
        ([1, None], "prompt token 1 is None"),
        ([5, -1], r"prompt token 1 is -1: token ids must be integers in \[0, 100\)"),
        ([100], r"prompt token 0 is 100: token ids must lie in \[0, 100\)"),
        ([2**31], r"prompt token 0 is 2147483648: token ids must lie in"),
        ([2**32 + 7], r"prompt token 0 is 4294967303"),
        (np.array([1.0, 2.0]), "must be a one-dimensional array of integers, got shape .* of float64"),
        (np.array([[1], [2]]), r"got shape \(2, 1\) of int64"),
        (np.array([True]), "one-dimensional array of integers, got shape .* of bool"),
        (np.array([2**32 + 7]), "prompt token 0 is 4294967303: token ids must lie in"),
        (np.array([3, -1]), "prompt token 1 is -1: token ids must lie in"),
        ([], "the prompt is empty: give at least one token"),
    ],
)
def test_what_is_not_a_token_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        Request("r", bad, vocab_size=100)


def test_a_request_needs_tokens_or_embeddings():
    with pytest.raises(ValueError, match="needs prompt_token_ids or prompt_embeds"):
        Request("r")


def test_output_is_checked_and_hashed():
    hasher = get_request_block_hasher(4, "sha256", "0")
    request = Request("r", [1, 2, 3], vocab_size=10, block_hasher=hasher)
    assert request.block_hashes == []
    request.append_output_token_ids(4)
    assert request.block_hashes == Request("s", [1, 2, 3, 4], block_hasher=hasher).block_hashes
    request.append_output_token_ids([5, 6])
    assert (request.num_tokens, request.num_output_tokens, request.output_token_ids) == (6, 3, [4, 5, 6])
    for bad in ([10], 10, -1, True, 2**31, 3.0, "7"):
        with pytest.raises(ValueError, match="output token 0 is "):
            request.append_output_token_ids(bad)
    assert request.output_token_ids == [4, 5, 6]


def test_when_the_cache_must_not_be_read():
    assert not Request("r", [1]).get_skip_reading_prefix_cache()
    assert Request("r", [1], prompt_logprobs=0).get_skip_reading_prefix_cache()
    assert Request("r", [1], pooling="mean").get_skip_reading_prefix_cache()
    assert not Request("r", [1], pooling="last").get_skip_reading_prefix_cache()
    assert not Request(
        "r", [1], prompt_logprobs=1, skip_reading_prefix_cache=False
    ).get_skip_reading_prefix_cache()
    assert Request("r", [1], skip_reading_prefix_cache=True).get_skip_reading_prefix_cache()


def test_priority_order():
    late = Request("a", [1], priority=0, arrival_time=2.0)
    early = Request("b", [1], priority=0, arrival_time=1.0)
    urgent = Request("c", [1], priority=-1, arrival_time=3.0)
    assert sorted([late, early, urgent]) == [urgent, early, late]
    assert RequestStatus.FINISHED_LENGTH.finished
    assert not RequestStatus.PREEMPTED.finished


def test_packed_ids_are_32_bit():
    assert pack_token_ids([2**31 - 1]).itemsize == 4
