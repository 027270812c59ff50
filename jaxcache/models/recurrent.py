"""The real-gated linear recurrent unit of Griffin (https://arxiv.org/abs/2402.19427, section 2.4) over paged
state.

A sequence's state after position `p` lies in the block that holds position `p`: there it can be found again by
whoever continues a text from the end of that block. A step reads the state before a sequence's first new row from
the block of the position before it (a text's first row starts from zero), and writes the state after its last new
row. States in between are not kept, so a step whose rows end at a block's end is what leaves a state there to be
reused.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxcache.kernels.layout import NULL_BLOCK, KVCache
from jaxcache.kernels.step import StepInputs
from jaxcache.models.activations import ACTIVATIONS
from jaxcache.models.config import ModelConfig
from jaxcache.models.layers import INIT_STD, LayerContext, Linear

DECAY_SCALE = 8.0
"""`c` of equation 6."""


class RecurrentState(NamedTuple):
    """States of the recurrent layers of one group: `L` layers, `B` blocks, `W` lanes, `P` inputs (the taps but
    one).
    """

    conv: Float[Array, "L B P W"]
    """The last inputs of the convolution, oldest first; of the model's dtype."""
    hidden: Float[Array, "L B W"]
    """f32."""


class HybridCache(NamedTuple):
    """What a model with recurrent layers keeps: both arrays are indexed by block."""

    kv: KVCache
    state: RecurrentState


def init_state(config: ModelConfig, num_blocks: int, dtype: jax.typing.DTypeLike) -> RecurrentState:
    """Zeroed states of `config.state_layers` layers; `dtype` is that of the model."""
    if config.recurrent is None:
        raise ValueError("the model has no recurrent layers")
    width, taps = config.recurrent.width, config.recurrent.conv_width
    return RecurrentState(
        jnp.zeros((config.state_layers, num_blocks, taps - 1, width), dtype),
        jnp.zeros((config.state_layers, num_blocks, width), jnp.float32),
    )


def state_bytes(config: ModelConfig, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of recurrent state that one block takes over all layers of a group; 0 without recurrent layers.

    RecurrentGemma 2B has 18 recurrent layers in 3 groups of 6, of 2,560 lanes and 4 taps: 150 KiB in bfloat16.
    """
    if config.recurrent is None:
        return 0
    lanes = (config.recurrent.conv_width - 1) * jnp.dtype(dtype).itemsize + jnp.dtype(jnp.float32).itemsize
    return config.state_layers * config.recurrent.width * lanes


class _Runs(NamedTuple):
    """Which rows and which state belong to whom: `T` rows of `S` sequences."""

    seq: Int[Array, " T"]
    offset: Int[Array, " T"]
    """Rows of the same sequence before this one."""
    rows: Int[Array, " S"]
    read: Int[Array, " S"]
    """Block of the state before the first row."""
    write: Int[Array, " S"]
    """Block for the state after the last row; outside the array where there is nothing to write."""
    fresh: Bool[Array, " S"]
    """Whether the sequence starts here, from a state of zero."""


def _runs(step: StepInputs, num_blocks: int, block_size: int) -> _Runs:
    row = jnp.arange(step.token_ids.shape[0], dtype=jnp.int32)
    sequences = step.seq_lens.shape[0]
    seq = jnp.searchsorted(step.query_start, row, side="right").astype(jnp.int32) - 1
    seq = jnp.minimum(seq, sequences - 1)
    rows = jnp.diff(step.query_start)
    start = step.seq_lens - rows

    def block_of(position: Int[Array, " S"]) -> Int[Array, " S"]:
        column = jnp.maximum(position, 0) // block_size
        return jnp.take_along_axis(step.block_tables, column[:, None], axis=1)[:, 0]

    write = block_of(step.seq_lens - 1)
    write = jnp.where((rows > 0) & (write != NULL_BLOCK), write, num_blocks)
    return _Runs(seq, row - step.query_start[seq], rows, block_of(start - 1), write, start == 0)


class RecurrentMixer(nnx.Module):
    """The recurrent layer in the place of attention: a gate beside a short convolution and the RG-LRU.

    `xy` is `[hidden, 2, width]`, the convolution's weight `[taps, width]`, the gates' weights `[2, heads, width /
    heads, width / heads]` (input, recurrence).
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        if config.recurrent is None:
            raise ValueError("the config has no recurrent layers")
        width, taps = config.recurrent.width, config.recurrent.conv_width
        self.activation = config.activation
        self.xy = Linear((config.hidden_size,), (2, width), bias=True, dtype=dtype, rngs=rngs)
        self.out = Linear((width,), (config.hidden_size,), bias=True, dtype=dtype, rngs=rngs)
        block = (2, config.num_heads, width // config.num_heads)
        gates = jax.random.normal(rngs.params(), (*block, block[-1]))
        self.gates = nnx.Param((gates * INIT_STD).astype(dtype))
        self.gates_b = nnx.Param(jnp.zeros(block, dtype))
        self.conv = nnx.Param((jax.random.normal(rngs.params(), (taps, width)) * INIT_STD).astype(dtype))
        self.conv_b = nnx.Param(jnp.zeros(width, dtype))
        self.decay = nnx.Param(jnp.zeros(width, dtype))

    def __call__(
        self, x: Float[Array, "T D"], cache: HybridCache, context: LayerContext
    ) -> tuple[Float[Array, "T D"], HybridCache]:
        kv, state = cache
        step, layer = context.step, context.layer
        runs = _runs(step, state.hidden.shape[1], kv.data.shape[4])
        conv_before = state.conv[layer, runs.read].astype(x.dtype)
        before = RecurrentState(
            jnp.where(runs.fresh[:, None, None], jnp.zeros((), x.dtype), conv_before),
            jnp.where(runs.fresh[:, None], 0.0, state.hidden[layer, runs.read]),
        )
        both = self.xy(x)
        inputs, gate = both[:, 0], ACTIVATIONS[self.activation](both[:, 1])
        decay, drive = self._recurrence(self._convolve(inputs, before.conv, runs), step.positions)
        drive = drive + jnp.where(runs.offset[:, None] == 0, decay * before.hidden[runs.seq], 0.0)
        hidden = drive if step.tiles.seq.shape[0] == 0 else _scan(decay, drive, runs.offset == 0)
        y = self.out(hidden.astype(x.dtype) * gate)

        last = jnp.maximum(step.query_start[1:] - 1, 0)
        conv_after = _conv_after(inputs, before.conv, step, runs).astype(state.conv.dtype)
        state = RecurrentState(
            state.conv.at[layer, runs.write].set(conv_after, mode="drop"),
            state.hidden.at[layer, runs.write].set(hidden[last], mode="drop"),
        )
        return y, HybridCache(kv, state)

    def _convolve(
        self, inputs: Float[Array, "T W"], before: Float[Array, "S P W"], runs: _Runs
    ) -> Float[Array, "T W"]:
        """The causal convolution of each sequence: a row and the `taps - 1` inputs before it."""
        weight = self.conv[...].astype(jnp.float32)
        taps = weight.shape[0]
        total = inputs.astype(jnp.float32) * weight[-1][None] + self.conv_b[...].astype(jnp.float32)[None]
        for back in range(1, taps):
            here = jnp.pad(inputs, ((back, 0), (0, 0)))[: inputs.shape[0]]
            there = before[runs.seq, jnp.clip(taps - 1 + runs.offset - back, 0, taps - 2)]
            tap = jnp.where(runs.offset[:, None] >= back, here, there)
            total = total + tap.astype(jnp.float32) * weight[-1 - back][None]
        return total.astype(inputs.dtype)

    def _recurrence(
        self, x: Float[Array, "T W"], positions: Int[Array, " T"]
    ) -> tuple[Float[Array, "T W"], Float[Array, "T W"]]:
        """`a` and `b` of `h[t] = a[t] h[t - 1] + b[t]` (equations 3 to 6); f32."""
        tokens, width = x.shape
        _, heads, block, _ = self.gates.shape
        gates = jnp.einsum(
            "tnb,gnbc->gtnc", x.reshape(tokens, heads, block), self.gates[...], preferred_element_type=jnp.float32
        )
        gates = jax.nn.sigmoid(gates + self.gates_b[...].astype(jnp.float32)[:, None])
        open_input, open_decay = gates.reshape(2, tokens, width)
        log_decay = -DECAY_SCALE * open_decay * jax.nn.softplus(self.decay[...].astype(jnp.float32))[None]
        first = positions[:, None] == 0
        scale = jnp.where(first, 1.0, jnp.sqrt(-jnp.expm1(2.0 * log_decay)))
        return jnp.where(first, 0.0, jnp.exp(log_decay)), x.astype(jnp.float32) * open_input * scale


def _scan(
    decay: Float[Array, "T W"], drive: Float[Array, "T W"], starts: Bool[Array, " T"]
) -> Float[Array, "T W"]:
    """`h[t] = decay[t] h[t - 1] + drive[t]`, where rows that start a sequence take nothing from the row before."""

    def join(left: tuple[Array, Array, Array], right: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        starts = left[2] | right[2]
        return left[0] * right[0], jnp.where(right[2], right[1], right[0] * left[1] + right[1]), starts

    return lax.associative_scan(join, (decay, drive, starts[:, None]))[1]


def _conv_after(
    inputs: Float[Array, "T W"], before: Float[Array, "S P W"], step: StepInputs, runs: _Runs
) -> Float[Array, "S P W"]:
    """The last inputs of each sequence, as far as it has none in this step those of before."""
    kept = before.shape[1]
    offset = runs.rows[:, None] - kept + jnp.arange(kept, dtype=jnp.int32)[None]
    here = inputs[jnp.maximum(step.query_start[:-1, None] + offset, 0)]
    there = jnp.take_along_axis(before, jnp.clip(kept + offset, 0, kept - 1)[:, :, None], axis=1)
    return jnp.where(offset[:, :, None] >= 0, here, there)
