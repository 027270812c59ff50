"""Choosing tokens from logits, on the device.

The order is that of vLLM: temperature, min-p, top-k, top-p over what is left, then one draw. Nothing is sorted:
a filter keeps the tokens at or above a threshold, and the threshold is found by bisection over the 32 bits of a
float (31 passes over the logits; sorting 49,152 of them takes 15 times as long on a CPU). Tokens equal to the
threshold are all kept, so a result does not depend on how ties would have been sorted.

The draw is an argmax over logits with Gumbel noise. The noise comes from the request's seed and the token's
position, and no sum over the vocabulary enters it, so that a row's token does not depend on the rest of the batch,
on its size, or on whether the request was preempted in between.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxcache.engine.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_LOGPROBS,
    MAX_SUPPRESSED,
    SamplingParams,
)

__all__ = [
    "MAX_LOGPROBS",
    "SamplingInputs",
    "SamplingParams",
    "sample",
    "token_logprobs",
    "top_logprobs",
]

UNUSED_ID = np.iinfo(np.int32).max
"""Beyond any vocabulary: writes to it are dropped."""

AnyArray = Array | np.ndarray


class SamplingInputs(NamedTuple):
    """How each of `S` sequences samples; padding rows are greedy."""

    temperature: Float[AnyArray, " S"]
    """0 where the row is greedy."""
    top_k: Int[AnyArray, " S"]
    """0 where off."""
    top_p: Float[AnyArray, " S"]
    min_p: Float[AnyArray, " S"]
    seeds: UInt32[AnyArray, " S"]
    positions: Int[AnyArray, " S"]
    """Position in its sequence of the token to be chosen."""
    suppressed: Int[AnyArray, "S B"]
    """Ids that may not be chosen; `UNUSED_ID` where there are fewer than `B`."""

    @staticmethod
    def build(
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        size: int,
        suppressed: Sequence[Sequence[int]] = (),
    ) -> "SamplingInputs":
        """Rows on the host (numpy), padded to `size`.

        `seeds`: one per row, any 64-bit integer: `params.seed`, or the one drawn when the request came in.
        `suppressed`: for each row its `params.suppressed_ids(...)`; none at all where empty.
        """
        rows = len(params)
        if not rows == len(seeds) == len(positions) or rows > size or len(suppressed) not in (0, rows):
            raise ValueError(
                f"one seed, position and (if any) list of suppressed ids per sequence, at most {size}: got {rows} "
                f"sequences, {len(seeds)} seeds, {len(positions)} positions, {len(suppressed)} lists"
            )
        inputs = SamplingInputs(
            temperature=np.zeros(size, np.float32),
            top_k=np.zeros(size, np.int32),
            top_p=np.ones(size, np.float32),
            min_p=np.zeros(size, np.float32),
            seeds=np.zeros(size, np.uint32),
            positions=np.zeros(size, np.int32),
            suppressed=np.full((size, MAX_SUPPRESSED), UNUSED_ID, np.int32),
        )
        for row, one in enumerate(params):
            inputs.temperature[row] = 0.0 if one.greedy else one.temperature
            inputs.top_k[row] = min(one.top_k, UNUSED_ID)
            inputs.top_p[row] = one.top_p
            inputs.min_p[row] = one.min_p
            inputs.seeds[row] = _seed32(seeds[row])
            inputs.positions[row] = positions[row]
        for row, ids in enumerate(suppressed):
            if len(ids) > MAX_SUPPRESSED:
                raise ValueError(f"at most {MAX_SUPPRESSED} ids can be suppressed, got {len(ids)}: {list(ids)}")
            inputs.suppressed[row, : len(ids)] = ids
        return inputs


def _seed32(seed: int) -> int:
    """64 bits into 32; seeds from 0 to 2**32 - 1 stay as they are."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low ^ (high * 0x9E3779B1 & 0xFFFFFFFF)


def sample(logits: Float[Array, "S V"], inputs: SamplingInputs) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """The next token of each sequence, and its log probability under the logits as they were given.

    `logits` float32. Pure, for use under jit. A batch that is greedy throughout neither draws nor filters.
    """
    most_likely = _argmax(logits)
    plain = jnp.all(inputs.temperature < GREEDY_TEMPERATURE) & jnp.all(inputs.suppressed >= logits.shape[1])
    tokens = lax.cond(plain, lambda: most_likely, lambda: _suppress_and_draw(logits, inputs))
    return tokens, token_logprobs(logits, tokens)


def token_logprobs(logits: Float[Array, "S V"], tokens: Int[Array, " S"]) -> Float[Array, " S"]:
    """Log probability of one given token per row."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)


def top_logprobs(logits: Float[Array, "S V"], k: int) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:
    """The `k` most likely tokens per row: log probabilities in falling order, and ids (lowest first on ties)."""
    values, ids = lax.top_k(logits, min(k, logits.shape[1]))
    return values - jax.nn.logsumexp(logits, axis=1, keepdims=True), ids


def _argmax(logits: Float[Array, "S V"]) -> Int[Array, " S"]:
    """The lowest id of the largest logit; two reductions, which take a sixth of `jnp.argmax`'s time on a CPU."""
    vocab_size = logits.shape[1]
    largest = jnp.max(logits, axis=1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = jnp.min(jnp.where(logits == largest, ids, vocab_size), axis=1)
    return jnp.minimum(first, vocab_size - 1)  # a row of NaN equals nothing


def _suppress_and_draw(logits: Float[Array, "S V"], inputs: SamplingInputs) -> Int[Array, " S"]:
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, inputs.suppressed].set(-jnp.inf, mode="drop")
    greedy = inputs.temperature < GREEDY_TEMPERATURE
    temperature = jnp.where(greedy, 1.0, inputs.temperature)
    scaled = (logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None]
    filtering = (inputs.min_p > 0) | (inputs.top_k > 0) | (inputs.top_p < 1)
    kept = lax.cond(jnp.any(filtering), _filter, lambda x, _: x, scaled, inputs)
    return jnp.where(greedy, _argmax(logits), _argmax(kept + _gumbel(inputs, logits.shape[1])))


def _filter(scaled: Float[Array, "S V"], inputs: SamplingInputs) -> Float[Array, "S V"]:
    """`scaled` (0 at each row's largest) with -inf where min-p, top-k or top-p leave a token out."""

    def keep_top_k(scaled: Array) -> Array:
        budget = jnp.where(inputs.top_k > 0, inputs.top_k.astype(jnp.float32), jnp.inf)
        return _keep_heaviest(scaled, jnp.ones_like(scaled), budget)

    def keep_top_p(scaled: Array) -> Array:
        weight = jnp.exp(scaled)
        budget = jnp.where(inputs.top_p < 1, inputs.top_p * jnp.sum(weight, axis=1), jnp.inf)
        return _keep_heaviest(scaled, weight, budget)

    scaled = jnp.where(scaled >= jnp.log(inputs.min_p)[:, None], scaled, -jnp.inf)
    scaled = lax.cond(jnp.any(inputs.top_k > 0), keep_top_k, lambda x: x, scaled)
    return lax.cond(jnp.any(inputs.top_p < 1), keep_top_p, lambda x: x, scaled)


def _keep_heaviest(
    scaled: Float[Array, "S V"], weight: Float[Array, "S V"], budget: Float[Array, " S"]
) -> Float[Array, "S V"]:
    """Keep a token where the weights of all tokens above it sum to less than the row's budget.

    With weights of 1 and budget k that is top-k, with probabilities and budget p it is top-p. The largest is
    always kept. Bisection: the lowest bit pattern `t` such that what lies above `t` weighs less than the budget.
    """
    order = _order(scaled)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        above = jnp.sum(jnp.where(order > middle[:, None], weight, 0.0), axis=1)
        fits = above < budget
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    rows = scaled.shape[0]
    lowest = jnp.full(rows, _order(jnp.float32(-jnp.inf)), jnp.int32)
    _, threshold = lax.fori_loop(0, 31, halve, (lowest, jnp.zeros(rows, jnp.int32)))
    return jnp.where(order >= threshold[:, None], scaled, -jnp.inf)


def _order(x: Array) -> Array:
    """float32 to int32 such that order is kept; both zeros become 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, jnp.iinfo(jnp.int32).min - bits, bits)


def _gumbel(inputs: SamplingInputs, vocab_size: int) -> Float[Array, "S V"]:
    def noise(seed: AnyArray, position: AnyArray) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(noise)(inputs.seeds, inputs.positions)
