"""Reading models from disk, whatever their form."""

from jaxcache.models.loading.cache import cache_home
from jaxcache.models.loading.checkpoint import Checkpoint, LoadedModel
from jaxcache.models.loading.find import ModelSource, find_model
from jaxcache.models.loading.gguf import read_gguf
from jaxcache.models.loading.huggingface import read_huggingface
from jaxcache.models.loading.orbax import CheckpointError, restore_checkpoint, save_checkpoint
from jaxcache.models.loading.registry import load_model

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LoadedModel",
    "ModelSource",
    "cache_home",
    "find_model",
    "load_model",
    "read_gguf",
    "read_huggingface",
    "restore_checkpoint",
    "save_checkpoint",
]
