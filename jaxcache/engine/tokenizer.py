"""The tokenizer belongs to the model and is loaded with it; this is where the engine looks for it."""

from jaxcache.models.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "TextTokenizer", "Tokenizer"]
