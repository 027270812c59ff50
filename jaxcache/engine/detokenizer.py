"""Text as it is generated: no half characters, no text that a stop string takes back."""

import codecs
from collections.abc import Sequence

from jaxcache.models.tokenizer import TextTokenizer


class Detokenizer:
    """Token by token what `TextTokenizer.decode` gives for all tokens at once.

    A character whose bytes come in several tokens appears with the last of them. Each token costs its own bytes,
    not those before it.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, starts_text: bool = False
    ) -> None:
        """`starts_text`: the tokens begin a text, so that the space which SentencePiece puts there is left out;
        not so where they go on from a prompt.
        """
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces_to_drop = tokenizer.leading_spaces if starts_text else 0

    def append(self, token_id: int) -> str:
        """The text that `token_id` completes, which may be none."""
        if token_id in self._skip:
            return ""
        return self._without_leading_space(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What is left at the end: a character that was never completed comes out as U+FFFD."""
        text = self._without_leading_space(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return text

    def _without_leading_space(self, text: str) -> str:
        while text and self._spaces_to_drop:
            if not text.startswith(" "):
                self._spaces_to_drop = 0
            else:
                text, self._spaces_to_drop = text[1:], self._spaces_to_drop - 1
        return text


class StopChecker:
    """Ends a text at the first stop string, and holds back what could be the beginning of one.

    The string that is complete first ends the text (of two that end at the same character, the longer), so the
    result does not depend on how the text was cut into tokens.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool = False) -> None:
        self._stop = tuple(sorted(stop, key=len, reverse=True))
        self._include = include_stop_str
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def append(self, text: str) -> str:
        """The text that is now certain. Once `matched` is set nothing more comes."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            end, self.matched = found
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the text ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """End and string of the match that ends first."""
        ends = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        return (min(ends)[0], min(ends)[2]) if ends else None

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        limit = max(map(len, self._stop), default=1) - 1
        for size in range(min(limit, len(text)), 0, -1):
            tail = text[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0
