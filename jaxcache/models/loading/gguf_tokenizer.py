"""The tokenizer that a GGUF file describes, rebuilt with the `tokenizers` library.

A GGUF file names its pre-tokeniser (`tokenizer.ggml.pre`) and leaves what the name means to the program that reads
it. The meanings here are those of llama.cpp.
"""

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from jaxcache.models.tokenizer import SPACE_MARK, Tokenizer

logger = logging.getLogger("jaxcache")

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_WORDS = GPT4O_WORDS.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")

GPT2_PRE = {"gpt2", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"}
DIGITS_PRE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
LLAMA3_PRE = {"llama-bpe", "llama3", "llama-v3", "falcon3"}
QWEN2_PRE = {"qwen2", "deepseek-r1-qwen"}
GPT4O_PRE = {"gpt-4o"}
TEKKEN_PRE = {"tekken"}
WHOLE_WORDS_PRE = LLAMA3_PRE | TEKKEN_PRE
"""With these a word that is a token is not put together by merges, and a text begins with bos."""
SPLIT_BY = {
    **dict.fromkeys(LLAMA3_PRE, LLAMA3_WORDS),
    **dict.fromkeys(QWEN2_PRE, QWEN2_WORDS),
    **dict.fromkeys(GPT4O_PRE, GPT4O_WORDS),
    **dict.fromkeys(TEKKEN_PRE, TEKKEN_WORDS),
}

TURN_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|end_of_text|>",
)  # fmt: skip
"""Control tokens that end an answer whether or not the file's metadata says so."""
MESSAGE_END, ANSWER_END = "<|end|>", "<|return|>"
"""Where there is the second (gpt-oss), the first ends only one of an answer's messages."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata; a `ValueError` for a kind that is not known here."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("the file holds no vocabulary (tokenizer.ggml.tokens): take one that has its tokenizer")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        library = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        library = _sentencepiece_bpe(metadata, tokens, types)
    else:
        raise ValueError(f"tokenizer model {kind!r} is not supported: only gpt2 (byte-level BPE) and llama (SPM)")
    _add_special_tokens(library, tokens, types)
    _add_sequence_ends(library, metadata, tokens)
    return Tokenizer(
        library,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_ids(metadata, tokens, types),
    )


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Library:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        logger.warning(
            "the file does not name its pre-tokeniser (tokenizer.ggml.pre): gpt2's is assumed, and answers are "
            "worse where that is wrong. Convert the model anew to have it named"
        )
        pre = "gpt2"
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    if pre in GPT2_PRE:
        split = whole
    elif pre in DIGITS_PRE:
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    elif pre in SPLIT_BY:
        words = Regex(SPLIT_BY[pre])
        split = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), bytes_only])
    else:
        known = ", ".join(sorted(GPT2_PRE | DIGITS_PRE | SPLIT_BY.keys()))
        raise ValueError(f"pre-tokeniser {pre!r} (tokenizer.ggml.pre) is not known; known are {known}")
    merges: list[tuple[str, str]] = []
    pairs: list[str] = metadata.get("tokenizer.ggml.merges", [])
    for merge in pairs:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = Library(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS_PRE))
    library.pre_tokenizer = split
    library.decoder = decoders.ByteLevel()
    if pre in QWEN2_PRE:
        library.normalizer = normalizers.NFC()
    return library


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Library:
    """SentencePiece's BPE: of two neighbours, those are joined whose joint piece has the highest score."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise ValueError("a llama (SPM) vocabulary needs tokenizer.ggml.scores, and this file has none")
    pieces = {
        token: i
        for i, token in enumerate(tokens)
        if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    }
    ranked: list[tuple[float, int, int]] = []
    for piece, i in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right))
    ranked.sort()
    merges = [(tokens[left], tokens[right]) for _, left, right in ranked]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = Library(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if prefix else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    undo: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*undo, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return library


def _add_special_tokens(library: Library, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens (special) and user-defined ones (matched before anything else, but part of the text)."""
    control = [t for t, kind in zip(tokens, types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    defined = [t for t, kind in zip(tokens, types) if kind == TokenType.USER_DEFINED]
    library.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    library.add_tokens([AddedToken(token, normalized=False) for token in defined])


def _add_sequence_ends(library: Library, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """What `encode(add_special_tokens=True)` puts around a text."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    starts = sentencepiece or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS_PRE
    around = []
    for end, default in (("bos", starts), ("eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{end}_token_id")
        if token_id is not None and metadata.get(f"tokenizer.ggml.add_{end}_token", default):
            around.append((end, tokens[token_id], token_id))
    if around:
        before = [token for end, token, _ in around if end == "bos"]
        after = [token for end, token, _ in around if end == "eos"]
        library.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(token, i) for _, token, i in around]
        )


def _eos_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    named = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    turn_ends = [i for i, token in enumerate(tokens) if token in TURN_ENDS and types[i] == TokenType.CONTROL]
    if ANSWER_END in tokens:
        turn_ends = [i for i in turn_ends if tokens[i] != MESSAGE_END]
    return list(dict.fromkeys(i for i in (*named, *turn_ends) if i is not None))
