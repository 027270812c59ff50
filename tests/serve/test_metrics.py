"""Metrics as Prometheus' own parser reads them, and the dashboard that asks for them."""

import json
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from jaxcache import CacheConfig
from tests.serve.serving import serving

ROOT = Path(__file__).parents[2]


def scrape(server):
    text = httpx.get(f"{server.url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families, name, **labels):
    family = families.get(name.removesuffix("_total")) or families[re.sub(r"_(count|sum|bucket)$", "", name)]
    (sample,) = [s for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    return sample.value


def ask(server, prompt, n=8):
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]


def test_counts_agree_with_what_clients_were_told():
    with serving() as server:
        usages = [ask(server, "a" * 50), ask(server, "a" * 50), ask(server, "b" * 30)]
        server.settle()
        families = scrape(server)
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert hits == 48
    assert value(families, "jaxcache:prefix_cache_queries_total", model_name="model") == prompt
    assert value(families, "jaxcache:prefix_cache_hits_total") == hits
    assert value(families, "jaxcache:prompt_tokens_total") == prompt
    assert value(families, "jaxcache:generation_tokens_total") == 24
    assert value(families, "jaxcache:time_to_first_token_seconds_count") == 3
    assert value(families, "jaxcache:inter_token_latency_seconds_count") == 21
    assert value(families, "jaxcache:e2e_request_latency_seconds_count") == 3
    assert value(families, "jaxcache:request_success_total", finished_reason="length") == 3
    assert value(families, "jaxcache:num_requests_running") == 0
    assert value(families, "jaxcache:num_requests_waiting") == 0
    assert value(families, "jaxcache:kv_cache_usage_perc") == 0
    assert value(families, "jaxcache:num_preemptions_total") == 0
    missed = [
        value(families, "jaxcache:prefix_cache_missed_tokens_total", reason=r) for r in ("new", "evicted", "tail")
    ]
    assert missed == [48 + 28, 0, 2 + 2 + 2]
    assert sum(missed) == prompt - hits


def test_answers_to_one_prompt_count_their_gaps_each_for_itself():
    with serving() as server:
        body = {"prompt": "a" * 50, "n": 3, "max_tokens": 8, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        families = scrape(server)
    assert value(families, "jaxcache:inter_token_latency_seconds_count") == 3 * 7
    assert value(families, "jaxcache:generation_tokens_total") == 3 * 8
    assert value(families, "jaxcache:prompt_tokens_total") == 50
    assert value(families, "jaxcache:time_to_first_token_seconds_count") == 1


def test_block_lifetimes_are_measured_when_blocks_are_evicted():
    from tests.serve.serving import text_engine

    with serving(text_engine(cache=CacheConfig(block_size=4, num_blocks=30))) as server:
        for letter in "aabca":
            ask(server, letter * 60)
        families = scrape(server)
    evicted = value(families, "jaxcache:kv_cache_evicted_blocks_total")
    assert evicted > 10
    for name in ("lifetime", "idle_before_evict"):
        assert value(families, f"jaxcache:kv_block_{name}_seconds_count") == evicted
    assert value(families, "jaxcache:kv_block_reuse_gap_seconds_count") > 10
    assert value(families, "jaxcache:prefix_cache_missed_tokens_total", reason="evicted") > 0


def test_the_dashboard_asks_for_metrics_that_exist():
    with serving() as server:
        ask(server, "x" * 20)
        names = {sample.name for family in scrape(server).values() for sample in family.samples}
    dashboard = json.loads((ROOT / "examples/grafana-dashboard.json").read_text())
    asked = set(re.findall(r"jaxcache:\w+", json.dumps([p["targets"] for p in dashboard["panels"]])))
    assert asked <= names
    assert len(asked) >= 12
