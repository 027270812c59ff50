"""`/v1/embeddings`, asked by the official client (it wants base64 unless told otherwise) and over plain HTTP."""

import threading

import httpx
import numpy as np
import openai
import pytest

from tests.serve.serving import serving, slow_engine, text_engine

TEXT = "You are a pirate who answers in one short sentence. "


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed(client, text, **options):
    return client.embeddings.create(model="model", input=text, **options)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_what_the_engine_says_the_first_time_and_the_second(client, running, pooling):
    prompt = f"{pooling}: {TEXT}"
    (expected,) = text_engine().embed(prompt, pooling=pooling)
    cached = []
    for _ in range(2):
        answer = embed(client, prompt, extra_body={"pooling": pooling})
        assert (answer.object, answer.model) == ("list", "model")
        (item,) = answer.data
        assert (item.object, item.index) == ("embedding", 0)
        np.testing.assert_allclose(item.embedding, expected, atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(prompt)
        cached.append(answer.usage.prompt_tokens_details["cached_tokens"])
    assert cached == [0, (len(prompt) - 1) // 4 * 4 if pooling == "last" else 0]
    running.settle()


def test_both_encodings_carry_the_same_float32s(running):
    body = {"input": "encodings", "model": "model"}

    def ask(**options):
        answer = httpx.post(f"{running.url}/v1/embeddings", json=body | options, timeout=60)
        assert answer.status_code == 200
        return answer.json()["data"][0]["embedding"]

    ask(skip_reading_prefix_cache=True)
    numbers, text = ask(), ask(encoding_format="base64")
    assert isinstance(numbers, list)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        assert embed(client, "encodings", encoding_format="base64").data[0].embedding == text
        np.testing.assert_allclose(embed(client, "encodings").data[0].embedding, numbers, rtol=1e-7)
    assert np.linalg.norm(numbers) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(ask(normalize=False)) != pytest.approx(1, abs=1e-2)


def test_texts_and_token_ids_alone_and_in_lists(client):
    texts = ["one " + TEXT, "two", "one " + TEXT]
    ids = [list(text.encode()) for text in texts]
    together = [item.embedding for item in embed(client, texts).data]
    assert [item.index for item in embed(client, texts).data] == [0, 1, 2]
    np.testing.assert_allclose([item.embedding for item in embed(client, ids).data], together, atol=1e-5)
    np.testing.assert_allclose(embed(client, ids[1]).data[0].embedding, together[1], atol=1e-5)
    np.testing.assert_allclose(together[0], together[2], atol=1e-5)
    assert np.abs(np.subtract(together[0], together[1])).max() > 0.1


def test_salts_and_flags_hold_for_embeddings_too(client):
    def cached(**extra):
        answer = embed(client, "embedded: " + TEXT, extra_body=extra)
        return answer.usage.prompt_tokens_details["cached_tokens"]

    assert cached(cache_salt="mine") == cached(cache_salt="yours", skip_writing_prefix_cache=True) == 0
    assert cached(cache_salt="yours") == 0
    assert cached(cache_salt="mine", priority=1) > 40
    assert cached(cache_salt="mine", skip_reading_prefix_cache=True) == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input must be a text, token ids, or a list of either, not empty"),
        ({"input": ""}, "prompt is empty"),
        ({"input": [999]}, r"prompt token 0 is 999: token ids must lie in \[0, 257\)"),
        ({"input": "x" * 3000}, "max_model_len"),
        ({"input": "x", "dimensions": 8}, "dimensions is not supported here"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format must be 'float' or 'base64', got 'hex'"),
        ({"input": "x", "pooling": "max"}, "pooling must be 'last' or 'mean', got 'max'"),
        ({"input": "x", "temperature": 1}, "temperature is not a parameter of this endpoint"),
    ],
)
def test_what_cannot_be_done_is_a_400_in_openais_shape(running, body, message):
    answer = httpx.post(f"{running.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    with pytest.raises(ValueError, match=message):
        raise ValueError(answer.json()["error"]["message"])


def test_more_inputs_than_places_are_computed_in_turn():
    texts = [f"{nth} {TEXT}" for nth in range(5)]
    body = {"prompt": TEXT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with serving(slow_engine(), max_queued_requests=2) as server:

        def ask(inputs):
            return httpx.post(f"{server.url}/v1/embeddings", json={"input": inputs}, timeout=60)

        together = ask(texts).json()["data"]
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            alone = [ask(text).json()["data"][0]["embedding"] for text in texts]
            again = ask(texts).json()["data"]
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as other:
                more = other.iter_lines()
                assert next(more).startswith("data: ")
                assert ask(texts).status_code == 429
        server.settle()
    for items in (together, again):
        assert [item["index"] for item in items] == [0, 1, 2, 3, 4]
        np.testing.assert_allclose([item["embedding"] for item in items], alone, atol=1e-5)


def test_embeddings_and_answers_run_side_by_side_and_a_failing_step_is_told():
    engine = text_engine()
    with serving(engine) as server:
        url, results = server.url, {}
        body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}

        def ask(nth):
            path, what = ("completions", body) if nth % 2 else ("embeddings", {"input": TEXT, "pooling": "mean"})
            results[nth] = httpx.post(f"{url}/v1/{path}", json=what, timeout=60).json()

        threads = [threading.Thread(target=ask, args=(nth,)) for nth in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({results[nth]["choices"][0]["text"] for nth in (1, 3, 5, 7)}) == 1
        vectors = [results[nth]["data"][0]["embedding"] for nth in (0, 2, 4, 6)]
        np.testing.assert_allclose(vectors, [vectors[0]] * 4, atol=1e-5)
        server.settle()
        run, engine.runner.run = engine.runner.run, lambda *_: (_ for _ in ()).throw(RuntimeError("boom"))
        failed = httpx.post(f"{url}/v1/embeddings", json={"input": "y"}, timeout=60)
        assert failed.status_code == 500
        assert "boom" in failed.json()["error"]["message"]
        engine.runner.run = run
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "y"}, timeout=60).status_code == 200
        server.settle()
