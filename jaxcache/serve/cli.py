"""`jaxcache serve`: the engine behind an OpenAI-compatible HTTP server."""

import argparse
import logging
from collections.abc import Sequence
from functools import partial

from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.events import KVEventsConfig
from jaxcache.flags import add_flags, from_options, refuse
from jaxcache.models.lora import LoRAConfig
from jaxcache.serve.config import ServerConfig


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="a folder, a GGUF file, a checkpoint, or a package that ships a model")
    parser.add_argument("--dtype", help="of the weights: float32, bfloat16, ... (default: what suits the device)")
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="adapters, folders that PEFT saved, and the names that clients give as a model's to choose them",
    )
    for config in (ServerConfig, CacheConfig, SchedulerConfig, KVEventsConfig, LoRAConfig):
        add_flags(parser, config)
    parser.set_defaults(run=run, refuse=partial(refuse, parser))


def adapter_paths(modules: Sequence[str]) -> dict[str, str]:
    """Adapters' folders by name, from `--lora-modules`; a `ValueError` for what is not NAME=PATH."""
    paths: dict[str, str] = {}
    for module in modules:
        name, equals, path = module.partition("=")
        if not (name and equals and path) or name in paths:
            raise ValueError(f"--lora-modules takes NAME=PATH, each name once, got {module!r}")
        paths[name] = path
    return paths


def run(options: argparse.Namespace) -> None:
    """Load the model, then serve until told to stop."""
    from jaxcache.engine import Engine

    try:
        from jaxcache.serve.server import serve
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serving needs packages that are not here ({error}): pip install 'jaxcache[serve]'"
        ) from error

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxcache").setLevel(logging.INFO)
    events = from_options(KVEventsConfig, options)
    server = from_options(ServerConfig, options)
    adapters = adapter_paths(options.lora_modules)
    engine = Engine.from_pretrained(
        options.model,
        cache=from_options(CacheConfig, options),
        scheduler=from_options(SchedulerConfig, options),
        events=events,
        dtype=options.dtype,
        lora=from_options(LoRAConfig, options) if adapters else None,
    )
    for name, path in adapters.items():
        if name == (server.served_model_name or engine.name):
            raise ValueError(f"--lora-modules {name}={path}: the model itself goes by that name")
        engine.load_adapter(name, path)
    serve(engine, server, events)
