"""Reading models from disk, whatever their form."""

from jaxcache.models.loading.checkpoint import Checkpoint
from jaxcache.models.loading.find import ModelSource, find_model
from jaxcache.models.loading.gguf import read_gguf
from jaxcache.models.loading.huggingface import read_huggingface

__all__ = ["Checkpoint", "ModelSource", "find_model", "read_gguf", "read_huggingface"]
