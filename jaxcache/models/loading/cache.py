"""Where converted weights are kept between runs, and under which name."""

import hashlib
import os
from pathlib import Path

import numpy as np

from jaxcache.models.loading.orbax import FORMAT


def cache_home() -> Path:
    """`$JAXCACHE_HOME`, else `$XDG_CACHE_HOME/jaxcache`, else `~/.cache/jaxcache`."""
    if home := os.environ.get("JAXCACHE_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxcache"


def cache_path(file: Path, dtype: np.dtype) -> Path:
    """The folder for `file` converted to `dtype`: its name holds the sha256 of the file, so a file with other
    contents never finds it, whatever the file is called.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return cache_home() / "models" / f"{digest[:40]}-{dtype.name}-v{FORMAT}"
