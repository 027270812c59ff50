"""Reading models from disk, whatever their form."""

from jaxcache.models.loading.checkpoint import Checkpoint
from jaxcache.models.loading.gguf import read_gguf

__all__ = ["Checkpoint", "read_gguf"]
