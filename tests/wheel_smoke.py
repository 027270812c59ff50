"""Run by CI outside the checkout: what was installed is whole and works."""

import importlib.util

import numpy as np

import jaxcache as jc

for name in ("models", "kernels"):
    assert importlib.util.find_spec(name) is None, f"the wheel installs a bare {name!r}"

cache = jc.PrefixCache(jc.CacheConfig(num_blocks=16, block_size=4))
for cached in (0, 8):
    with cache.open(np.arange(12)) as sequence:
        assert sequence.num_cached_tokens == cached
        cache.step_inputs([sequence])
        cache.commit(sequence, 7)
cache.check_invariants()
print("jaxcache", jc.__version__, "from", jc.__file__)
