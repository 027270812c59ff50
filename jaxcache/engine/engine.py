"""The engine on text: prompts in, text out, around `EngineCore`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.events import KVEventsConfig
from jaxcache.core.request import RequestStatus
from jaxcache.engine.adapters import LoadedAdapter
from jaxcache.engine.answers import Answer, RequestParams, for_core, num_answers
from jaxcache.engine.chat import apply_chat_template
from jaxcache.engine.core import CoreOutput, EngineCore
from jaxcache.engine.inputs import Prompt, PromptInputs, batch_of
from jaxcache.engine.outputs import Completion, Delta, RequestOutput
from jaxcache.engine.pooling_params import PoolingParams
from jaxcache.engine.runner import ModelConfigLike, ModelRunner
from jaxcache.engine.sampling_params import SamplingParams
from jaxcache.engine.session import Session
from jaxcache.engine.sizing import choose_sizes
from jaxcache.engine.step_inputs import Buckets
from jaxcache.kernels.dispatch import Implementation
from jaxcache.models.loading.peft import read_peft
from jaxcache.models.lora import LoRAAdapter, LoRAConfig
from jaxcache.models.tokenizer import TextTokenizer


class Engine:
    """Generates text with prefix caching. One thread at a time may use it."""

    def __init__(
        self,
        model: nnx.Module,
        config: ModelConfigLike,
        tokenizer: TextTokenizer | None = None,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        buckets: Buckets | None = None,
        implementation: Implementation = None,
        name: str = "model",
        events: KVEventsConfig | None = None,
        lora: LoRAConfig | None = None,
    ) -> None:
        """`model`: called as `model(step, kv, implementation=...)` and `model.logits(rows)`, see `models.Llama`.

        Without a tokenizer the engine takes and gives token ids only. `lora`: room for adapters.
        """
        self.cache_config = cache or CacheConfig()
        self.scheduler_config = scheduler or SchedulerConfig()
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.name = name
        sizes = choose_sizes(config, self.cache_config, self.scheduler_config)
        limits = self.scheduler_config.max_num_batched_tokens, self.scheduler_config.max_num_seqs
        if buckets is not None:
            buckets.check_room(*limits)
        self.max_model_len = sizes.max_model_len
        self.runner = ModelRunner(
            model,
            config,
            num_blocks=sizes.num_blocks,
            block_size=self.cache_config.block_size,
            kv_dtype=sizes.kv_dtype,
            max_model_len=sizes.max_model_len,
            buckets=buckets or Buckets.for_limits(*limits),
            implementation=implementation,
            lora=lora,
            check_steps=self.cache_config.check_steps,
            share_runs=self.cache_config.shared_prefix_attention,
        )
        self.core = EngineCore(
            self.runner,
            self.cache_config,
            self.scheduler_config,
            num_blocks=sizes.num_blocks,
            max_model_len=sizes.max_model_len,
            eos_token_ids=eos_token_ids,
            causal=getattr(config, "causal", True),
            embeds_only=getattr(config, "embeds_only", None),
            events=events,
        )
        self._outputs: dict[str, RequestOutput] = {}
        """Requests that have not ended."""
        self._answers: dict[str, Answer] = {}
        """Their running answers, by the id that the core knows each by."""
        self._kept: list[Delta] = []
        """What steps run for others did for requests whose owner has not asked yet."""
        self._ids = count()

    @classmethod
    def from_pretrained(
        cls,
        path_or_package: str,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        buckets: Buckets | None = None,
        implementation: Implementation = None,
        events: KVEventsConfig | None = None,
        lora: LoRAConfig | None = None,
    ) -> "Engine":
        """An engine for a model on disk: a Hugging Face folder, a GGUF file, a checkpoint of ours, or the name of
        an installed Python package that ships a GGUF file (`models.load_model`).
        """
        from jaxcache.models.loading import load_model

        loaded = load_model(path_or_package, dtype=dtype)
        return cls(
            loaded.model,
            loaded.config,
            loaded.tokenizer,
            cache=cache,
            scheduler=scheduler,
            chat_template=loaded.chat_template,
            eos_token_ids=loaded.eos_token_ids,
            buckets=buckets,
            implementation=implementation,
            name=loaded.name,
            events=events,
            lora=lora,
        )

    # One call

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer `prompts` (texts, token ids, or `PromptInputs`), in their order.

        `params`: one for all, or one for each. `progress`: a bar on stderr; by default for more than one prompt.
        A `ValueError`, with nothing begun, if any prompt cannot be computed.
        """
        batch = batch_of(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts need 1 or {len(batch)} SamplingParams, got {len(each)}")
        progress = len(batch) > 1 if progress is None else progress
        return self._answer_all(batch, each, progress, adapter=adapter, cache_salt=cache_salt)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        prompts = [self.chat_prompt(m) for m in ([messages] if one else messages)]  # pyright: ignore
        return self.generate(prompts, params, **options)

    def chat_prompt(self, messages: Any, **variables: Any) -> list[int]:
        """The token ids of a conversation under the model's chat template, up to where the answer begins."""
        tokenizer = self._text_tokenizer()
        text = apply_chat_template(
            self.chat_template,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **variables,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[Delta]:
        """Answer `prompt` piece by piece: queued when the first one is asked for, aborted if left early."""
        yield from self.follow(self.add_request(prompt, params, adapter=adapter, cache_salt=cache_salt))

    def follow(self, request_id: str) -> Iterator[Delta]:
        """Step until a request has ended, and give what that does for it. Leaving early aborts the request."""
        output, num_ended = self.output(request_id), 0
        try:
            while num_ended < len(output.completions) and self._concerns(request_id):
                for delta in self._deltas_of({request_id}):
                    num_ended += delta.finish_reason is not None
                    yield delta
        finally:
            self.abort(request_id)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> np.ndarray:
        """Embeddings of `prompts` (texts, token ids, or `PromptInputs`), float32 [len(prompts), width].

        `pooling`, `normalize`: as `PoolingParams` has them. A `RuntimeError` where a prompt could not be computed.
        """
        batch = batch_of(prompts)
        if not batch:
            raise ValueError("there are no prompts to embed: give at least one")
        params = PoolingParams(pooling=pooling, normalize=normalize)
        outputs = self._answer_all(batch, [params] * len(batch), False, adapter=adapter, cache_salt=cache_salt)
        vectors = [output.embedding for output in outputs if output.embedding is not None]
        if len(vectors) < len(outputs):
            raise RuntimeError("; ".join(output.error for output in outputs if output.error))
        return np.stack(vectors)

    def session(self, *, adapter: str | None = None, cache_salt: str | None = None, priority: int = 0) -> Session:
        """A conversation whose turns build on each other; options as in `add_request`, for all turns."""
        return Session(self, adapter=adapter, cache_salt=cache_salt, priority=priority)

    # Step by step

    def add_request(
        self,
        prompt: Prompt,
        params: RequestParams | None = None,
        *,
        request_id: str | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt; returns the request's id. A `ValueError` for one that can never be computed.

        With `PoolingParams` it ends in one delta, whose `output` has the embedding.
        `adapter`: the name of a loaded one; the request keeps the version that it has now. `cache_salt`: only
        requests with the same salt share cached blocks. `priority`: smaller is sooner, where the scheduler's
        policy is "priority".
        """
        params = params or SamplingParams()
        if not isinstance(params, RequestParams):
            raise ValueError(f"params must be SamplingParams or PoolingParams, got {type(params).__name__}")
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        if self._concerns(request_id):
            raise ValueError(f"request id {request_id!r} is in use: give each request its own")
        text, inputs = self._encode(prompt)
        if isinstance(params, SamplingParams) and params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        arrival = time.perf_counter()
        completions = [Completion(i) for i in range(num_answers(params))]
        output = RequestOutput(request_id, text, [], completions, arrival_time=arrival)
        self._outputs[request_id] = output
        try:
            for completion in completions:
                sampling, pooling = for_core(params, completion.index)
                request = self.core.add_request(
                    _core_id(output, completion),
                    inputs,
                    sampling,
                    adapter=adapter,
                    cache_salt=cache_salt,
                    priority=priority,
                    pooling=pooling,
                )
                output.prompt_token_ids = output.prompt_token_ids or request.prompt_token_ids
                answer = Answer.begin(request, output, completion, params, self.tokenizer)
                self._answers[request.request_id] = answer
        except BaseException:
            for core_id in (_core_id(output, completion) for completion in completions):
                self.core.finish(core_id, RequestStatus.FINISHED_ABORTED)
                self._answers.pop(core_id, None)
            del self._outputs[request_id]
            raise
        return request_id

    def step(self) -> list[Delta]:
        """Compute one step. Returns what it added to each answer, and what steps that `generate`, `stream` or
        `embed` ran for others added before. If it raises, the next one tells whose requests ended with it.
        """
        try:
            deltas = self._advance()
        except BaseException:
            self._kept += self._collect_failed()
            raise
        kept, self._kept = self._kept, []
        return kept + deltas

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are given back. Unknown and finished ones are left alone."""
        if output := self._outputs.get(request_id):
            for completion in output.completions:
                if completion.finish_reason is None:
                    self._drop(_core_id(output, completion), RequestStatus.FINISHED_ABORTED)
        self._kept = [delta for delta in self._kept if delta.request_id != request_id]

    def output(self, request_id: str) -> RequestOutput:
        """A request as it stands, which goes on changing until it has ended; a `ValueError` for one that has."""
        if request_id not in self._outputs:
            raise ValueError(f"request {request_id!r} has ended, or never was")
        return self._outputs[request_id]

    def is_active(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return request_id in self._outputs

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do, or to tell."""
        return self.core.has_unfinished or bool(self._kept)

    def warmup(self, progress: bool = True, *, embeds: bool = False) -> None:
        """Compile all that steps can need; afterwards nothing compiles any more.

        `embeds`: also what steps with features or prompt embeddings need, which otherwise compile when they come.
        """
        self.runner.warmup(progress, embeds=embeds)
        self.core.kv.warmup(self.core.scheduler.config.max_num_seqs)
        if (num_steps := self.core.scheduler.config.decode_steps) > 1:
            self.runner.warmup_steps(self.core.kv.pool, num_steps)

    def load_adapter(
        self, name: str, adapter: str | Path | LoRAAdapter, *, replace: bool = False
    ) -> LoadedAdapter:
        """Make an adapter (a folder that PEFT saved, or arrays) available to requests under `name`.

        With `replace` it takes the place of the one of that name: what was cached under that is not found any
        more, and requests that began with it end with it. A `ValueError`, with nothing changed, if it does not fit
        the model, or no slot is free (`LoRAConfig`).
        """
        if not isinstance(adapter, LoRAAdapter):
            adapter = read_peft(adapter)
        return self.core.load_adapter(name, adapter, replace)

    def unload_adapter(self, name: str) -> None:
        """No new request may name it; those that began with it end with it, and then its slot is free.

        A `ValueError` if there is none of that name.
        """
        self.core.adapters.unload(name)

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests may name."""
        return self.core.adapters.loaded

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached content. While requests run: `False`, saying who, or have them computed again."""
        return self.core.reset_prefix_cache(reset_running)

    def update_params(self, params: Any) -> None:
        """Give the model other weights (`nnx.state` of the same model); nothing cached before is found again."""
        self.core.update_params(params)

    def stats(self) -> dict[str, float]:
        """Counts since the start (hits and queries in tokens, each admission once), and the present state."""
        scheduler, kv = self.core.scheduler, self.core.kv
        stats = scheduler.stats
        queries, hits = stats.queries + stats.preempted_queries, stats.hits + stats.preempted_hits
        return {
            "prefix_cache_queries": stats.queries,
            "prefix_cache_hits": stats.hits,
            "prefix_cache_hit_rate": stats.hits / stats.queries if stats.queries else 0.0,
            "preempted_queries": queries - stats.queries,
            "preempted_hits": hits - stats.hits,
            "num_preemptions": scheduler.num_preemptions,
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_evicted_blocks": kv.num_evicted_blocks,
            "num_blocks": kv.pool.num_blocks,
            "num_free_blocks": kv.pool.num_free,
            "kv_cache_usage": kv.usage,
            "kv_cache_bytes": self.runner.kv_bytes,
        }

    # Inside

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`; a `ValueError` for an engine without a tokenizer."""
        return self._text_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, prompt: Prompt) -> tuple[str | None, PromptInputs]:
        if isinstance(prompt, str):
            return prompt, PromptInputs(self.encode(prompt))
        if isinstance(prompt, PromptInputs):
            return None, prompt
        if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
            raise ValueError(f"a prompt must be a string or a sequence of token ids, got {type(prompt).__name__}")
        return None, PromptInputs(prompt)

    def _text_tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer: give token ids instead of text")
        return self.tokenizer

    # Steps, and who gets to know of them

    def _advance(self) -> list[Delta]:
        return [self._delta(output) for output in self.core.step()]

    def _deltas_of(self, ids: set[str]) -> list[Delta]:
        """What is kept for `ids`; else what one more step does for them. The rest is kept for its owners."""
        if not any(delta.request_id in ids for delta in self._kept):
            try:
                self._kept += self._advance()
            except BaseException:
                self._kept += self._collect_failed()
                raise
        mine = [delta for delta in self._kept if delta.request_id in ids]
        self._kept = [delta for delta in self._kept if delta.request_id not in ids]
        return mine

    def _concerns(self, request_id: str) -> bool:
        """Whether the request has not ended, or its owner does not know yet that it has."""
        return request_id in self._outputs or any(delta.request_id == request_id for delta in self._kept)

    def _delta(self, core: CoreOutput) -> Delta:
        """Enter one step's result into the answer it belongs to."""
        request, answer = core.request, self._answers[core.request.request_id]
        completion = answer.completion
        text = answer.take(core, time.perf_counter())
        if answer.stop.matched is not None:
            completion.stop_reason = answer.stop.matched
            self._drop(request.request_id, RequestStatus.FINISHED_STOPPED)
        elif core.finished:
            if core.stop_token_id not in self.core.eos_token_ids:
                completion.stop_reason = core.stop_token_id
            completion.error = request.error
            self._drop(request.request_id, request.status)
        return Delta(
            answer.output.request_id,
            completion.index,
            text,
            () if core.token_id is None else (core.token_id,),
            () if core.logprobs is None else (core.logprobs,),
            completion.finish_reason,
            answer.output,
        )

    def _drop(self, core_id: str, status: RequestStatus) -> None:
        """The answer has ended: the core lets go of the request, the output says how it ended."""
        answer = self._answers.pop(core_id)
        self.core.finish(core_id, status)
        answer.completion.finish_reason = status.value
        if answer.output.finished:
            answer.output.finish_time = time.perf_counter()
            del self._outputs[answer.output.request_id]

    def _collect_failed(self) -> list[Delta]:
        """End the answers whose requests a failed step has ended."""
        deltas = []
        for core_id in [i for i in self._answers if not self.core.is_active(i)]:
            answer = self._answers[core_id]
            answer.completion.error = answer.request.error
            self._drop(core_id, RequestStatus.FINISHED_ERROR)
            name, index = answer.output.request_id, answer.completion.index
            deltas.append(Delta(name, index, "", (), (), answer.completion.finish_reason, answer.output))
        return deltas

    def _answer_all(
        self, prompts: list[Any], params: Sequence[RequestParams | None], progress: bool, **options: Any
    ) -> list[RequestOutput]:
        """Queue all prompts, and step until they have ended; a `ValueError`, with nothing begun, if one cannot."""
        ids: list[str] = []
        try:
            for nth, (prompt, one) in enumerate(zip(prompts, params)):
                try:
                    ids.append(self.add_request(prompt, one, **options))
                except ValueError as error:
                    raise ValueError(f"prompt {nth}: {error}") from error
            outputs = [self._outputs[request_id] for request_id in ids]
            running = set(ids)
            with tqdm(total=len(ids), desc="generating", unit="prompt", disable=not progress) as bar:
                while running:
                    for delta in self._deltas_of(running):
                        if delta.output.finished and delta.request_id in running:
                            running.remove(delta.request_id)
                            bar.update()
            return outputs
        finally:
            for request_id in ids:
                self.abort(request_id)


def _core_id(output: RequestOutput, completion: Completion) -> str:
    return f"{output.request_id}/{completion.index}"
