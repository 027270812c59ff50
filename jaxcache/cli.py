"""The command `jaxcache`: `serve` and `replay`."""

import argparse
import sys
from collections.abc import Sequence

from jaxcache.replay import cli as replay_cli
from jaxcache.serve import cli as serve_cli


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="jaxcache", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    serve_cli.add_parser(commands)
    replay_cli.add_parser(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.refuse(unknown)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"jaxcache: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
