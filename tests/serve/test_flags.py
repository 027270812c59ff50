"""Flags made from the config dataclasses, and the command around them."""

import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

from jaxcache.cli import main
from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.events import KVEventsConfig
from jaxcache.flags import add_flags, from_options
from jaxcache.serve.config import ServerConfig

CONFIGS = (ServerConfig, CacheConfig, SchedulerConfig, KVEventsConfig)


def parse(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for config in CONFIGS:
        add_flags(parser, config)
    return parser.parse_args(arguments)


def test_without_flags_the_defaults_hold():
    options = parse()
    assert [from_options(config, options) for config in CONFIGS] == [config() for config in CONFIGS]


def test_no_two_configs_share_a_flag():
    names = [field.name for config in CONFIGS for field in fields(config)]
    assert len(names) == len(set(names))


def test_flags_have_the_fields_names_and_types():
    options = parse(
        "--no-enable-prefix-caching", "--block-size", "32", "--num-blocks", "1000", "--watermark", "0.1",
        "--prefix-caching-hash-algo", "xxhash", "--hash-seed", "0", "--kv-cache-dtype", "bfloat16",
        "--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--max-model-len", "512",
    )  # fmt: skip
    assert from_options(CacheConfig, options) == CacheConfig(
        32, 1000, "bfloat16", enable_prefix_caching=False, prefix_caching_hash_algo="xxhash", hash_seed="0"
    )
    assert from_options(SchedulerConfig, options) == SchedulerConfig(4, 128, 512, watermark=0.1)
    assert from_options(CacheConfig, parse("--num-blocks", "none")).num_blocks is None


def test_the_help_is_the_fields_own_description(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in text
    assert "Tokens per block: hits are multiples of it. (default: 16)" in text
    assert "Answers that may wait or run; one more gets status 429. (default: 256)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blok-size", "32"], "unknown argument --blok-size: did you mean --block-size?"),
        (["--enable-prefix-cashing"], "did you mean --enable-prefix-caching?"),
        (["--block-size", "x"], "argument --block-size: invalid int value: 'x'"),
        (["--qqqqqq"], "unknown argument --qqqqqq"),
    ],
)
def test_a_typo_is_refused_with_a_suggestion(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "model", *arguments])
    assert message in capsys.readouterr().err


def test_a_value_that_is_not_allowed_is_refused_before_the_model_is_loaded(capsys):
    assert main(["serve", "/nowhere", "--block-size", "0"]) == 2
    assert "CacheConfig.block_size must be an integer of at least 1, got 0" in capsys.readouterr().err
    assert main(["serve", "/nowhere", "--port", "99999"]) == 2
    assert "ServerConfig.port must be an integer from 0 to 65535" in capsys.readouterr().err


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "jaxcache.serve", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "usage: jaxcache serve" in done.stdout
