"""Text to token ids and back.

A token is a run of bytes, and text is what the bytes of all tokens decode to as UTF-8. `decode` and the
incremental detokenizer both work on those bytes, so they cannot disagree.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space."""

_BYTE_ALPHABET_RANGES = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
_PLAIN = [byte for printable in _BYTE_ALPHABET_RANGES for byte in printable]
_SHIFTED = [byte for byte in range(256) if byte not in set(_PLAIN)]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PLAIN} | {chr(256 + i): b for i, b in enumerate(_SHIFTED)}
"""Byte-level BPE writes a byte as one printable character: printable bytes as they are, the rest from 256 up."""

_HALF_SURROGATE = "text to encode holds half of a surrogate pair, which is no character"


class TextTokenizer(ABC):
    """What the engine needs to know about a vocabulary."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end an answer."""
    leading_spaces: int = 0
    """Spaces that the tokenizer itself put at the start of a text; `decode` takes them off again."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, such as the end of a sequence."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]: ...

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id outside the vocabulary."""

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None: ...

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in token_ids if i not in skip).decode("utf-8", "replace")
        for _ in range(self.leading_spaces):
            text = text.removeprefix(" ")
        return text

    def _special_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self.id_to_token(token_id) or ""

    @property
    def bos_token(self) -> str:
        return self._special_text(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        return self._special_text(self.eos_token_ids[0] if self.eos_token_ids else None)


class Tokenizer(TextTokenizer):
    """A vocabulary as the `tokenizers` library runs it: byte-level BPE, or SentencePiece with or without bytes."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_level, self.leading_spaces = _decoder_kind(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """From the text of a `tokenizer.json`, which does not say which tokens begin and end a sequence. A length
        that it cuts or pads texts to is one of training, and is not kept.
        """
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # from_str raises nothing more specific
            raise ValueError(f"this tokenizer.json cannot be read by tokenizers: {error}") from error
        library.no_truncation()
        library.no_padding()
        return cls(library)

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens`: also what the vocabulary puts around a text (a begin-of-sequence token, say); not
        wanted for the output of a chat template, which has it already.
        `allow_special`: text that spells a special token (`<|im_end|>`) becomes that token. On by default, as in
        vLLM and transformers, since chat templates rely on it; turn it off for text from strangers that must not
        be able to end a turn.
        """
        tokenizer = self._tokenizer if allow_special else self._plain_text_tokenizer
        try:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(_HALF_SURROGATE) from error

    @cached_property
    def _plain_text_tokenizer(self) -> tokenizers.Tokenizer:
        """A copy that takes special tokens for ordinary text: the switch is a state of the tokenizer."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self.id_to_token(token_id)
            known = b"" if token is None else self._spelled_bytes(token)
            self._bytes[token_id] = known
        return known

    def _spelled_bytes(self, token: str) -> bytes:
        if self._byte_level:
            codes = [BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in codes else bytes(codes)  # pyright: ignore[reportArgumentType]
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE_MARK, " ").encode()


class ByteTokenizer(TextTokenizer):
    """One token per byte of UTF-8, then one to end a sequence: a vocabulary of 257 that needs no file."""

    eos_token_ids = (256,)

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset({256})

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(_HALF_SURROGATE) from error

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def id_to_token(self, token_id: int) -> str | None:
        if token_id == 256:
            return "<eos>"
        return f"<0x{token_id:02X}>" if 0 <= token_id < 256 else None


def _decoder_kind(tokenizer: tokenizers.Tokenizer) -> tuple[bool, int]:
    """Whether tokens spell bytes in the byte-level alphabet, and how many leading spaces are not the text's."""
    decoder: dict[str, Any] = (
        json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": "none"}
    )
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, 0
    if kinds == ["Metaspace"]:
        return False, 0 if steps[0].get("prepend_scheme") == "never" else 1
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "Fuse" in kinds:
        return False, sum(step["start"] for step in steps if step["type"] == "Strip")
    raise ValueError(
        f"the tokenizer's decoder is {' + '.join(kinds)}; supported are ByteLevel (byte-level BPE), Metaspace and "
        "Replace + ByteFallback + Fuse [+ Strip] (SentencePiece)"
    )
