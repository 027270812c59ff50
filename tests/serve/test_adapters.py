"""Adapters over HTTP: clients choose one by giving its name as a model's."""

import argparse

import httpx
import numpy as np
import pytest

import jaxcache as jc
from jaxcache.serve.cli import adapter_paths, add_parser, run
from tests.engine.test_adapters import PROMPT, adapter, ask, expected, make_engine
from tests.models.test_lora import save_peft
from tests.serve.serving import serving


def test_an_adapter_is_chosen_by_the_models_name():
    engine = make_engine()
    engine.load_adapter("a", adapter(0))
    engine.load_adapter("b", adapter(1))
    told = {None: engine.embed(PROMPT)[0], "b": engine.embed(PROMPT, adapter="b")[0]}
    engine.reset_prefix_cache()
    with serving(engine, warmup=False) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        cards = {card["id"]: card.get("parent") for card in http.get("/v1/models").json()["data"]}
        assert http.get("/v1/models/b").json()["parent"] == "model"
        assert cards == {"model": None, "a": "model", "b": "model"}
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 0}
        for name, seed in (("model", None), ("a", 0), ("b", 1)):
            for cached in (0, 20):
                answer = http.post("/v1/completions", json=body | {"model": name}).json()
                assert answer["model"] == name
                tokens = [int(token) for token in answer["choices"][0]["logprobs"]["tokens"]]
                assert tokens == expected(seed, tuple(PROMPT))
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        for name, vector in told.items():
            answer = http.post("/v1/embeddings", json={"input": PROMPT, "model": name or "model"}).json()
            assert answer["model"] == (name or "model")
            np.testing.assert_allclose(answer["data"][0]["embedding"], vector, atol=1e-5)
        answer = http.post("/v1/completions", json=body | {"model": "c"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        running.settle()


def options_of(*arguments):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", "x", *arguments])


def test_the_command_loads_what_it_is_given(tmp_path, monkeypatch):
    folder = save_peft(tmp_path / "x", adapter(0), r=3, lora_alpha=1.5)
    engines = []
    monkeypatch.setattr(jc.Engine, "from_pretrained", lambda *_, lora, **__: make_engine(lora=lora))
    monkeypatch.setattr("jaxcache.serve.server.serve", lambda engine, *_: engines.append(engine))
    run(options_of())
    run(
        options_of(
            "--lora-modules", f"sql={folder}", f"prose={folder}", "--max-loras", "2", "--max-lora-rank", "3"
        )
    )
    plain, engine = engines
    assert plain.runner.lora is None
    assert engine.runner.lora == jc.LoRAConfig(2, 3)
    assert [loaded.name for loaded in engine.adapters] == ["sql", "prose"]
    assert ask(engine, "sql")[0] == expected(0, tuple(PROMPT))
    with pytest.raises(ValueError, match=r"--lora-modules model=.*: the model itself goes by that name"):
        run(options_of("--lora-modules", f"model={folder}"))


@pytest.mark.parametrize("modules", [["x"], ["=x"], ["x="], ["a=x", "a=y"]])
def test_what_is_no_name_and_path(modules):
    with pytest.raises(ValueError, match=f"--lora-modules takes NAME=PATH, each name once, got '{modules[-1]}'"):
        adapter_paths(modules)
