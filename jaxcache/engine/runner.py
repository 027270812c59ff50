"""Runs planned steps on the device: parameters, the KV array, and one compiled function per shape."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxcache.core.block_pool import BlockPool
from jaxcache.engine.groups import kv_cache_groups, make_cache
from jaxcache.engine.multi_step import Sequences, decode_steps, sequences
from jaxcache.engine.sampling import SamplingInputs, sample, token_logprobs, top_logprobs
from jaxcache.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxcache.engine.shared_runs import find_runs
from jaxcache.engine.step_inputs import (
    Buckets,
    SequenceSlice,
    StepShape,
    build_row_inputs,
    build_step_inputs,
)
from jaxcache.kernels.dispatch import Implementation, check_runs_here
from jaxcache.kernels.paged_attention.api import BACKENDS
from jaxcache.kernels.step import StepInputs
from jaxcache.kernels.step_check import check_step
from jaxcache.models.decoder import Decoder
from jaxcache.models.lora import AdapterWeight, LoRAAdapter, LoRAConfig, add_slots, fill_slot
from jaxcache.models.rows import RowInputs


class ModelConfigLike(Protocol):
    """What the engine must know of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_position(self) -> int: ...


class SampledRow(NamedTuple):
    """Whose next token a step chooses, and how."""

    params: SamplingParams
    seed: int
    suppressed: Sequence[int]


class RunningSequence(NamedTuple):
    """A sequence that generates: all its tokens but the last are computed."""

    sampling: SampledRow
    last_token: int
    length: int
    """Tokens known."""
    block_ids: np.ndarray
    """int32, its block table."""
    full_at: int
    """The length at which it ends."""
    ending_ids: Collection[int]
    adapter: int
    """The slot of its adapter, 0 for none."""


class StepResult(NamedTuple):
    tokens: np.ndarray
    """int32, the chosen token per sequence; meaningless where the sequence's last token was not reached."""
    logprobs: np.ndarray
    """float32, the chosen tokens' log probabilities."""
    hidden: jax.Array
    """[rows, width], on the device, for those who want more log probabilities."""
    first_rows: np.ndarray
    """int32, each sequence's first row."""


class TokenLogprobs(NamedTuple):
    """Per position: the log probability of the token that is there, and of the likeliest ones."""

    logprobs: np.ndarray
    """float32 [n]"""
    top_logprobs: np.ndarray
    """float32 [n, k], falling"""
    top_ids: np.ndarray
    """int32 [n, k]"""


@partial(jax.jit, static_argnames=("graphdef", "implementation"), donate_argnames="kv")
def _step(graphdef, params, kv, step, implementation, adapters, rows):
    model = nnx.merge(graphdef, params, adapters)
    options = {} if rows is None else {"rows": rows}
    hidden, kv = model(step if len(step) > 1 else step[0], kv, implementation=implementation, **options)
    return kv, model.logits(hidden[step[0].logits_rows]), hidden


_sample = jax.jit(sample)
"""A program of its own: it depends on the number of sequences alone, the step on the number of rows too."""


@partial(jax.jit, static_argnames="graphdef")
def _logprobs(graphdef, params, adapters, hidden, rows, token_ids):
    logits = nnx.merge(graphdef, params, adapters).logits(hidden[rows])
    return token_logprobs(logits, token_ids), *top_logprobs(logits, MAX_LOGPROBS)


@jax.jit
def _pool_rows(hidden, start, count):
    """The sum of rows `[start, start + count)` in f32, and the last of them."""
    rows = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    inside = ((rows >= start) & (rows < start + count))[:, None]
    hidden = hidden.astype(jnp.float32)
    return jnp.sum(jnp.where(inside, hidden, 0.0), axis=0), hidden[start + count - 1]


class ModelRunner:
    """Owns the KV array: every step takes it and leaves the next one, in the same memory."""

    LOGPROB_ROWS = 64
    """Rows whose log probabilities are computed at a time, so that logits never fill the memory."""

    def __init__(
        self,
        model: nnx.Module,
        config: ModelConfigLike,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: jax.typing.DTypeLike,
        max_model_len: int,
        buckets: Buckets,
        implementation: Implementation = None,
        lora: LoRAConfig | None = None,
        check_steps: bool = False,
        share_runs: bool = True,
    ) -> None:
        """`model` is called with one `StepInputs`, or with a tuple of them if it has several KV-cache groups.

        `check_steps`: every step is looked over on the host before it runs (`kernels.check_step`).
        `share_runs`: blocks that many decodes begin with are attended to once (`engine.shared_runs`).
        `lora`: room for adapters, in a model of ours. Steps whose rows have adapters or embeddings are called with
        `rows=RowInputs(...)`, others without.
        """
        check_runs_here("paged_attention", implementation, BACKENDS)
        self.lora = lora
        if lora is not None:
            if not isinstance(model, Decoder):
                raise ValueError(f"adapters need a model of jaxcache.models, got {type(model).__name__}")
            model = add_slots(model, lora)
        self.graphdef, self.adapters, self.params = nnx.split(model, AdapterWeight, ...)
        self.config = config
        self.buckets = buckets
        self._block_size = block_size
        self._table_width = -(-max_model_len // block_size)
        self._implementation = implementation
        self._check_steps = check_steps
        self._share_runs = share_runs
        self._num_groups = len(kv_cache_groups(config, block_size))
        self._num_blocks = num_blocks
        self._kv_dtype = jnp.dtype(kv_dtype)
        self.reset_kv()

    def reset_kv(self) -> None:
        """A fresh KV array: whatever was cached is gone."""
        self.kv = make_cache(self.config, self._num_blocks, self._block_size, self._kv_dtype)

    def update_params(self, params: Any) -> None:
        """Other weights for the same model; a `ValueError` if their tree, shapes or dtypes are not the same."""
        old, new = (jax.tree_util.tree_flatten_with_path(tree) for tree in (self.params, params))
        if old[1] != new[1]:
            raise ValueError("the new params are another tree than the model's: give nnx.state of the same model")
        for (path, before), (_, after) in zip(old[0], new[0]):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise ValueError(
                    f"new params{jax.tree_util.keystr(path)} are {after.dtype}{list(after.shape)}, "
                    f"but the model has {before.dtype}{list(before.shape)}"
                )
        self.params = params

    def set_adapter(self, slot: int, adapter: LoRAAdapter | None) -> None:
        """Put an adapter into a slot, from 1 on; a `ValueError`, with nothing changed, if it does not fit."""
        adapters = jax.tree.map(lambda leaf: leaf, self.adapters)
        model: Any = nnx.merge(self.graphdef, self.params, adapters)
        fill_slot(model, slot, adapter)
        _, self.adapters, _ = nnx.split(model, AdapterWeight, ...)

    @property
    def embeds_width(self) -> int | None:
        """Of embeddings that may stand for tokens; `None` for a model that takes none."""
        return getattr(self.config, "hidden_size", None)

    @property
    def kv_lost(self) -> bool:
        """Whether a step failed after it had taken the KV array, or while it made the next one."""
        try:
            jax.block_until_ready(self.kv)
        except RuntimeError:
            return True
        return False

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV array."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.kv))

    def run(self, slices: Sequence[SequenceSlice], rows: Sequence[SampledRow]) -> StepResult:
        """Compute one step: write the KV of all slices, attend, and choose a token for each."""
        shape = self.buckets.fit(sum(len(piece.token_ids) for piece in slices), len(slices))
        step = self._inputs(slices, shape)
        if self._check_steps:
            for group in step:
                check_step(group, num_blocks=self._num_blocks, block_size=self._block_size)
        sampling = SamplingInputs.build(
            [row.params for row in rows],
            [row.seed for row in rows],
            step[0].seq_lens[: len(rows)].tolist(),
            shape.num_seqs,
            [row.suppressed for row in rows] if any(row.suppressed for row in rows) else (),
        )
        width = self.embeds_width if any(piece.rows for piece in slices) else None
        extra = build_row_inputs(slices, shape.num_tokens, adapters=self.lora is not None, embeds_width=width)
        tokens, logprobs, hidden = self._call(step, sampling, extra)
        n = len(slices)
        return StepResult(
            np.asarray(tokens)[:n], np.asarray(logprobs)[:n], hidden, np.asarray(step[0].query_start[:n])
        )

    def run_steps(
        self, running: Sequence[RunningSequence], pool: BlockPool, num_steps: int
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        """Up to `num_steps` tokens for each, until one ends or `pool` has too few free blocks.

        Returns tokens and newly allocated blocks, int32 `[steps, sequences]` (blocks: 0 for none), and the pool's
        next state, which is not the pool's yet.
        """
        size = self.buckets.fit(len(running), len(running)).num_seqs
        seqs = self._with_runs(sequences([one[1:6] for one in running], size, self._table_width))
        sampled = [one.sampling for one in running]
        positions = [0] * len(running)
        sampling = SamplingInputs.build(
            [row.params for row in sampled], [row.seed for row in sampled], positions, size
        )
        return self._generate(seqs, sampling, [one.adapter for one in running], pool, num_steps)

    def _generate(
        self, seqs: Sequences, sampling: SamplingInputs, slots: Sequence[int], pool: BlockPool, num_steps: int
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        rows = None
        if self.lora is not None:
            adapter: Any = np.array([*slots, *[0] * (len(seqs.lengths) - len(slots))], np.int32)
            rows = RowInputs(adapter)
        self.kv, state, done = decode_steps(
            self.graphdef,
            self.params,
            self.adapters,
            self.kv,
            jax.tree.map(np.asarray, pool.state),
            seqs,
            sampling,
            rows,
            implementation=self._implementation,
            policy=pool.policy,
            block_size=self._block_size,
            num_steps=num_steps,
        )
        steps, n = int(done.num_steps), len(slots)
        return np.asarray(done.tokens)[:steps, :n], np.asarray(done.new_blocks)[:steps, :n], state

    def _with_runs(self, seqs: Sequences) -> Sequences:
        if not self._share_runs:
            return seqs
        tables, lengths = np.asarray(seqs.tables), np.asarray(seqs.lengths)
        return seqs._replace(shared=find_runs(tables, lengths, self._block_size))

    def warmup_steps(self, pool: BlockPool, num_steps: int) -> None:
        """Compile `run_steps` for all numbers of sequences. Changes nothing."""
        for size in self.buckets.seq_counts:
            nobody = self._with_runs(sequences([], size, self._table_width))
            self._generate(nobody, SamplingInputs.build([], [], [], size), [], pool, num_steps)

    def logprobs(self, result: StepResult, rows: np.ndarray, token_ids: np.ndarray) -> TokenLogprobs:
        """Log probabilities that the step's `rows` give to `token_ids`, and to the `MAX_LOGPROBS` likeliest."""
        parts = []
        for at in range(0, len(rows), self.LOGPROB_ROWS):
            n = len(rows[at : at + self.LOGPROB_ROWS])
            padded = np.zeros((2, self.LOGPROB_ROWS), np.int32)
            padded[0, :n] = rows[at : at + n]
            padded[1, :n] = token_ids[at : at + n]
            answer = _logprobs(self.graphdef, self.params, self.adapters, result.hidden, padded[0], padded[1])
            parts.append([np.asarray(array)[:n] for array in answer])
        return TokenLogprobs(*(np.concatenate(arrays) for arrays in zip(*parts)))

    def pool_rows(self, result: StepResult, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sum, last) of the hidden states of `count` rows from `start` on, float32 [width]."""
        total, last = _pool_rows(result.hidden, np.int32(start), np.int32(count))
        return np.asarray(total), np.asarray(last)

    def warmup(self, progress: bool = True, *, embeds: bool = False) -> None:
        """Compile every shape that steps can have, with `embeds` also for embeddings. Touches no block."""
        widths = (None, self.embeds_width) if embeds and self.embeds_width is not None else (None,)
        kinds = [(shape, width) for shape in self.buckets.all_shapes() for width in widths]
        for shape, width in tqdm(kinds, "compiling step shapes", disable=not progress):
            step = self._inputs([], shape)
            extra = build_row_inputs([], shape.num_tokens, adapters=self.lora is not None, embeds_width=width)
            *_, hidden = self._call(step, SamplingInputs.build([], [], [], shape.num_seqs), extra)
            _pool_rows(hidden, np.int32(0), np.int32(1))
            rows = np.zeros(self.LOGPROB_ROWS, np.int32)
            _logprobs(self.graphdef, self.params, self.adapters, hidden, rows, rows)

    def _inputs(self, slices: Sequence[SequenceSlice], shape: StepShape) -> tuple[StepInputs, ...]:
        return build_step_inputs(
            slices,
            shape,
            block_size=self._block_size,
            table_width=self._table_width,
            tile_size=self.buckets.tile_size,
            num_groups=self._num_groups,
            share_runs=self._share_runs,
        )

    def _call(
        self, step: tuple[StepInputs, ...], sampling: SamplingInputs, rows: RowInputs | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        self.kv, logits, hidden = _step(
            self.graphdef, self.params, self.kv, step, self._implementation, self.adapters, rows
        )
        return *_sample(logits, sampling), hidden
