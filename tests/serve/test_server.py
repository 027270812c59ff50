"""The server, asked by the official client and over plain HTTP."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import openai
import pytest
import tokenizers

from jaxcache import CacheConfig, SamplingParams, SchedulerConfig
from jaxcache.core.scheduler import StepPlan
from jaxcache.models.tokenizer import Tokenizer
from tests.serve.serving import serving, slow_engine, text_engine

LONG = "You are a pirate who answers in one short sentence. "


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(running):
    with httpx.Client(base_url=running.url, timeout=60) as http:
        yield http


def fresh(tag: str) -> str:
    """A prompt that no other test has."""
    return f"{tag}: {LONG}"


def greedy(**options):
    return {"model": "model", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}} | options


def test_a_completion_is_what_the_engine_answers(client):
    prompt = fresh("same")
    answer = client.completions.create(prompt=prompt, **greedy())
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (expected,) = text_engine().generate([prompt], params, progress=False)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 8
    assert answer.object == "text_completion"


def test_cached_tokens_are_told_always(client):
    prompt = fresh("cached")
    counts = []
    for _ in range(2):
        usage = client.completions.create(prompt=prompt, **greedy()).usage
        counts.append(usage.prompt_tokens_details.cached_tokens)
        stream = client.completions.create(
            prompt=prompt, stream=True, stream_options={"include_usage": True}, **greedy()
        )
        *chunks, last = list(stream)
        assert last.choices == []
        assert all(chunk.usage is None for chunk in chunks)
        counts.append(last.usage.prompt_tokens_details.cached_tokens)
    hit = (len(prompt) - 1) // 4 * 4
    assert counts == [0, hit, hit, hit]


def test_streams_say_what_whole_answers_say(client):
    prompt = fresh("stream")
    whole = client.completions.create(prompt=prompt, n=2, seed=5, **greedy(temperature=1.0))
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in client.completions.create(prompt=prompt, n=2, seed=5, stream=True, **greedy(temperature=1.0)):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert texts[0] != texts[1]
    assert reasons == {0: "length", 1: "length"}


def test_several_prompts_and_token_ids(client):
    ids = list(fresh("ids").encode())
    texts = client.completions.create(prompt=[fresh("ids"), fresh("other")], **greedy())
    tokens = client.completions.create(prompt=[ids, list(fresh("other").encode())], **greedy())
    assert [c.index for c in texts.choices] == [0, 1]
    assert [c.text for c in texts.choices] == [c.text for c in tokens.choices]
    assert client.completions.create(prompt=ids, **greedy()).choices[0].text == texts.choices[0].text


def test_a_chat_goes_through_the_template(client):
    parts = [{"type": "text", "text": text} for text in ("Who", "are you?")]
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": parts}]
    chat = client.chat.completions.create(messages=messages, **greedy())
    plain = client.completions.create(prompt=f"system:{LONG};user:Who\nare you?;>", **greedy())
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    text, roles = "", []
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **greedy()
    )
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            roles.append(chunk.choices[0].delta.role)
        else:
            assert chunk.usage.prompt_tokens_details.cached_tokens > 40
    assert text == chat.choices[0].message.content
    assert roles == ["assistant"] + [None] * (len(roles) - 1)


@pytest.mark.parametrize("newer", [None, 3])
def test_either_name_limits_the_tokens_of_a_chat(http, newer):
    body = {"messages": [{"role": "user", "content": "limit"}], "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=body | {"max_completion_tokens": newer, "max_tokens": 2})
    assert answer.json()["usage"]["completion_tokens"] == (newer or 2)


def test_stop_strings_end_the_answer(client):
    prompt = fresh("stop")
    whole = client.completions.create(prompt=prompt, **greedy(max_tokens=40)).choices[0].text
    stop = whole[5:7]
    cut = client.completions.create(prompt=prompt, stop=[stop], **greedy(max_tokens=40)).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_log_probabilities_of_both_kinds(client):
    prompt = fresh("logprobs")
    plain = client.completions.create(prompt=prompt, logprobs=3, **greedy()).choices[0]
    assert len(plain.logprobs.tokens) == len(plain.logprobs.token_logprobs) == 8
    assert all(value <= 0 for value in plain.logprobs.token_logprobs)
    assert plain.logprobs.text_offset[0] == 0
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": prompt}], logprobs=True, top_logprobs=2, **greedy()
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 8
    assert all(len(position.top_logprobs) == 2 for position in content)
    assert content[0].logprob == max(top.logprob for top in content[0].top_logprobs)
    stream = client.completions.create(prompt=prompt, logprobs=3, stream=True, **greedy())
    streamed = [value for chunk in stream for value in chunk.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(plain.logprobs.token_logprobs, abs=1e-5)


def test_log_probabilities_of_the_prompt(http):
    prompt, body = fresh("prompt_logprobs"), {"max_tokens": 2, "prompt_logprobs": 3}
    params = SamplingParams(max_tokens=2, prompt_logprobs=3)
    (expected,) = text_engine().generate([prompt], params, progress=False)
    answer = http.post("/v1/completions", json=body | {"prompt": [prompt, "x"], "n": 2}).json()
    first, again, other, _ = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert first == again
    assert (first[0], other, len(first)) == (None, [None], len(prompt))
    for told, position, character in zip(first[1:], expected.prompt_logprobs[1:], prompt[1:], strict=True):
        top = dict(position.top)
        assert told.keys() == {str(position.token_id), *map(str, top)}
        chosen = told[str(position.token_id)]
        assert chosen["decoded_token"] == character
        assert chosen["logprob"] == pytest.approx(position.logprob, abs=1e-5)
        assert (chosen["rank"] is None) == (position.token_id not in top)
        assert [told[str(token_id)]["rank"] for token_id in top] == [1, 2, 3]
    chat = http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": "x"}]}).json()
    assert [told and len(told) >= 3 for told in chat["prompt_logprobs"]] == [None] + [True] * 7
    assert "prompt_logprobs" not in http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]
    refused = http.post("/v1/completions", json=body | {"prompt": "x", "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_a_salt_separates_tenants_in_time_and_in_counts(client):
    """Neither the work nor the reported count tells one tenant what another one asked."""
    prompt = fresh("salt")

    def cached(salt):
        extra = {"cache_salt": salt, "ignore_eos": True}
        return client.completions.create(
            prompt=prompt, **greedy(extra_body=extra)
        ).usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("b"), cached("a")] == [0, 0, (len(prompt) - 1) // 4 * 4]


def test_skip_flags_are_body_fields(client):
    prompt = fresh("skip")

    def cached(**flags):
        answer = client.completions.create(prompt=prompt, **greedy(extra_body=flags))
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(skip_writing_prefix_cache=True) == 0
    assert cached() == 0
    assert cached(skip_reading_prefix_cache=True) == 0
    assert cached(priority=3) > 0


def test_retention_is_a_body_field(client, http):
    prompt = fresh("retention")

    def cached(**flags):
        answer = client.completions.create(prompt=prompt, **greedy(extra_body=flags))
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_retention="none") == cached(cache_retention="low") == 0
    assert cached(cache_retention="default", prompt_cache_retention="in_memory") > 0
    answer = http.post("/v1/completions", json={"prompt": prompt, "cache_retention": "forever"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_retention"
    answer = http.post("/v1/completions", json={"prompt": prompt, "prompt_cache_retention": "24h"})
    assert answer.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"temprature": 1}, "temprature is not a parameter of this endpoint"),
        ({"echo": True}, "echo is not supported here"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported here"),
        ({"temperature": -1}, "temperature must be a number of at least 0"),
        ({"temperature": 10**400}, "temperature must be a number of at least 0, finite"),
        ({"\ud800": 1}, "\ud800 is not a parameter of this endpoint"),
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream: true"),
        ({"cache_salt": 7}, "cache_salt must be a string, got 7"),
        ({"n": 10**7}, "10000000 answers are asked for at once, 256 are allowed: ask for fewer"),
        (
            {"stop_token_ids": [2**40], "min_tokens": 1},
            r"stop_token_ids\[0\] must be an integer from 0 to 2147483647",
        ),
        ({"prompt": []}, "prompt must be a text, token ids, or a list of either, not empty"),
        ({"prompt": [999]}, r"prompt token 0 is 999: token ids must lie in \[0, 257\)"),
        ({"prompt": "x" * 3000}, "max_model_len"),
        ({"prompt": "x" * 3000, "stream": True}, "max_model_len"),
    ],
)
def test_what_cannot_be_done_is_a_400_in_openais_shape(http, extra, message):
    answer = http.post("/v1/completions", content=json.dumps({"prompt": "hello", "max_tokens": 2} | extra))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format is not supported here"),
        ({"tools": [{"type": "function"}]}, "tools is not supported here"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [5]}, "messages[0] must be a mapping with a 'role' (a string), got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0] has a part that is no text: 'image_url'",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs may not set messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs may not set self"),
    ],
)
def test_so_it_is_for_chats(http, extra, message):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = http.post("/v1/chat/completions", json=body | extra)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here, only 'model'"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_model_len") as info:
        client.completions.create(prompt="x" * 3000, **greedy())
    assert info.value.code == "context_length_exceeded"


def test_models_health_and_unknown_paths(client, http):
    (card,) = client.models.list()
    assert card.id == "model"
    assert client.models.retrieve("model") == card
    with pytest.raises(openai.NotFoundError, match="there is no model 'org/other' here, only 'model'"):
        client.models.retrieve("org/other")
    assert http.get("/health").json() == {"status": "ok"}
    missing = http.get("/v2/models")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions", content=b"{").status_code == 400
    assert (
        http.post("/v1/completions", content=b"[1]")
        .json()["error"]["message"]
        .startswith("the body must be a JSON")
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("embeddings", {"input": "x"}),
    ],
)
def test_null_is_as_if_left_out(http, path, body):
    answer = http.post(f"/v1/{path}", json=body | {"model": None, "function_call": None})
    assert (answer.status_code, answer.json()["model"]) == (200, "model")


def test_text_to_tokens_and_back(http):
    tokens = http.post("/tokenize", json={"prompt": "añb"}).json()
    assert tokens == {"tokens": [97, 195, 177, 98], "count": 4, "max_model_len": 2048}
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "añb"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"user:x;>"
    parts = [{"type": "text", "text": text} for text in ("Who", "are you?")]
    body = {"messages": [{"role": "user", "content": parts}]}
    for begins in (True, False):
        variables = {"add_generation_prompt": begins}
        chat = http.post("/tokenize", json=body | {"chat_template_kwargs": variables}).json()
        assert bytes(chat["tokens"]) == b"user:Who\nare you?;" + b">" * begins
    for wrong in (["a"], [257], [-1], [True], 5):
        answer = http.post("/detokenize", json={"tokens": wrong})
        assert answer.status_code == 400
        assert "token ids in [0, 257)" in answer.json()["error"]["message"]


def test_nobody_waits_while_a_text_is_tokenized(monkeypatch):
    engine = text_engine()
    began, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: (began.set(), go_on.wait(20), [1])[-1])
    with serving(engine) as server, ThreadPoolExecutor() as clients:
        answer = clients.submit(httpx.post, f"{server.url}/tokenize", json={"prompt": "x"}, timeout=60)
        assert began.wait(20)
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        go_on.set()
        assert answer.result().json()["count"] == 1


def test_what_sentencepiece_puts_before_a_text_is_not_given_back():
    vocabulary = {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3, "<s>": 4}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    library.add_special_tokens(["<s>"])
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    engine = text_engine()
    engine.tokenizer = Tokenizer(library)
    with serving(engine) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        tokens = http.post("/tokenize", json={"prompt": "ab a"}).json()["tokens"]
        assert tokens == [1, 2, 3, 1, 2]
        assert http.post("/detokenize", json={"tokens": [*tokens, 4]}).json() == {"prompt": "ab a<s>"}


def test_no_character_of_an_answer_ends_an_events_line(monkeypatch):
    engine = text_engine()
    monkeypatch.setattr(engine.tokenizer, "token_bytes", lambda _: "\u2028\x85".encode())
    with serving(engine) as server:
        body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            *events, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "\u2028\x85" * 2
    assert done == "[DONE]"


def test_a_failure_that_nobody_foresaw_has_openais_shape_too_and_hides_its_cause(monkeypatch):
    engine = text_engine()
    with serving(engine) as server:
        monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: {}["secret"])
        answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "x"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "KeyError" in answer.json()["error"]["message"]
        assert "secret" not in answer.text
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_failure_that_nobody_foresaw_in_the_engine_is_told_and_leaves_room_for_the_next(monkeypatch):
    engine = text_engine()
    with serving(engine, max_queued_requests=1) as server:
        body = {"prompt": "x", "max_tokens": 2}
        for stream in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(engine, "add_request", lambda *_, **__: {}["secret"])
                answer = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": stream}, timeout=20)
            assert answer.status_code == 500
            assert "KeyError" in answer.json()["error"]["message"]
            assert "secret" not in answer.text
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_the_cache_can_be_reset(client, http, running):
    prompt = fresh("reset")
    for _ in range(2):
        client.completions.create(prompt=prompt, **greedy())
    running.settle()
    assert http.post("/reset_prefix_cache").json() == {"status": "ok"}
    assert http.post("/reset_prefix_cache?reset_running=maybe").status_code == 400
    usage = client.completions.create(prompt=prompt, **greedy()).usage
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_a_client_that_goes_away_aborts_its_request(running):
    """In a stream, and waiting for a whole answer."""
    body = {"prompt": fresh("gone"), "max_tokens": 1500, "ignore_eos": True}
    url = f"{running.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert running.engine.has_unfinished
    running.settle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=httpx.Timeout(60, read=0.5))
    running.settle()
    assert b'finished_reason="abort"' in httpx.get(f"{running.url}/metrics").content


def test_too_many_requests_are_sent_away_and_told_when_to_return():
    with serving(slow_engine(), max_queued_requests=1) as server:
        body = {"prompt": fresh("many"), "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            second = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert second.status_code == 429
            assert int(second.headers["retry-after"]) >= 1
            assert second.json()["error"]["type"] == "rate_limit_error"
            busy = httpx.post(f"{server.url}/reset_prefix_cache")
            assert busy.status_code == 409
        server.settle()
        assert httpx.post(f"{server.url}/v1/completions", json=body | {"max_tokens": 1}).status_code == 200


def test_a_request_counts_from_before_its_text_is_tokenized(monkeypatch):
    engine = text_engine()
    encode, began, go_on = engine.tokenizer.encode, threading.Event(), threading.Event()
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text: (began.set(), go_on.wait(20), encode(text))[-1])
    with serving(engine, max_queued_requests=1) as server, ThreadPoolExecutor() as clients:
        body = {"prompt": "x", "max_tokens": 1}
        ask = partial(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        first = clients.submit(ask)
        assert began.wait(20)
        assert ask().status_code == 429
        go_on.set()
        assert first.result().status_code == 200
        assert ask().status_code == 200


def test_a_key_and_a_limit_on_bodies():
    with serving(api_key="s3cret", max_body_bytes=1000, served_model_name="pirate") as server:
        stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            stranger.models.list()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["pirate"]
            with pytest.raises(openai.APIStatusError, match="longer than 1000 bytes") as info:
                client.completions.create(model="pirate", prompt="x" * 1200)
            assert info.value.status_code == 413
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/stats").status_code == 401


def tokens_received_from_a_server_that_stops(engine, name, num_tokens, shutdown_timeout):
    """Stream an answer from a server that is told to stop once it has begun; (tokens, whether all came)."""
    began, received, ended = threading.Event(), [], threading.Event()

    def ask(url):
        body = {"prompt": fresh(name), "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended.set()
                elif line:
                    received.append(line)
                began.set()

    with serving(engine, shutdown_timeout=shutdown_timeout) as server:
        asking = threading.Thread(target=ask, args=(server.url,))
        asking.start()
        assert began.wait(60)
    asking.join(60)
    assert not engine.has_unfinished
    assert engine.core.kv.pool.num_free == engine.core.kv.pool.num_blocks - 1
    return len(received), ended.is_set()


def test_stopping_lets_requests_finish():
    assert tokens_received_from_a_server_that_stops(slow_engine(), "short", 20, shutdown_timeout=120) == (20, True)


def test_stopping_aborts_what_takes_longer():
    received, ended = tokens_received_from_a_server_that_stops(slow_engine(), "long", 1900, shutdown_timeout=1)
    assert 0 < received < 1900
    assert not ended


def test_a_failing_step_ends_its_requests_and_the_server_goes_on():
    engine = text_engine()
    with serving(engine) as server:
        body = {"prompt": fresh("fail"), "max_tokens": 4, "temperature": 0}
        good = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        run, engine.runner.run = engine.runner.run, lambda *_: (_ for _ in ()).throw(RuntimeError("boom"))
        failed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert failed.status_code == 500
        assert "boom" in failed.json()["error"]["message"]
        engine.runner.run = run
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert again["choices"] == good["choices"]
        server.settle()


def test_a_scheduler_that_is_stuck_ends_its_requests_instead_of_failing_for_ever(monkeypatch):
    engine = text_engine()
    with serving(engine) as server:
        schedule = engine.core.scheduler.schedule
        monkeypatch.setattr(engine.core.scheduler, "schedule", lambda: StepPlan(0))
        body = {"prompt": fresh("stuck"), "max_tokens": 4, "temperature": 0}
        stuck = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert stuck.status_code == 500
        assert "no progress in 9 steps" in stuck.json()["error"]["message"]
        server.settle()
        monkeypatch.setattr(engine.core.scheduler, "schedule", schedule)
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_many_clients_at_once_lose_nothing_and_leak_nothing():
    engine = text_engine(
        cache=CacheConfig(block_size=4, num_blocks=120),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    prompts = [LONG + str(n % 6) for n in range(24)]
    answers = {}
    with serving(engine) as server:

        def ask(nth):
            body = {"prompt": prompts[nth], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answers[nth] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()

        threads = [threading.Thread(target=ask, args=(nth,)) for nth in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.settle()
        stats = httpx.get(f"{server.url}/stats").json()
    by_prompt = {}
    for nth, answer in answers.items():
        by_prompt.setdefault(prompts[nth], set()).add(answer["choices"][0]["text"])
    assert len(answers) == 24
    assert all(len(texts) == 1 for texts in by_prompt.values())
    assert stats["prefix_cache_hits"] > 0.5 * stats["prefix_cache_queries"]
    assert json.dumps(stats["requests"])
