"""`python -m jaxcache.serve MODEL`: the same as `jaxcache serve MODEL`."""

import sys

from jaxcache.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
