import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxcache.models.loading import read_huggingface
from tests.models.model_files import CONFIG, write_folder


def test_everything_is_read(tmp_path):
    tensors = {
        "f32": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
        "f16": np.arange(6, dtype=np.float16).reshape(2, 3),
        "bf16": np.arange(6).astype(ml_dtypes.bfloat16),
    }
    checkpoint = read_huggingface(write_folder(tmp_path / "model", tensors))
    assert checkpoint.name == "model"
    assert checkpoint.config == CONFIG
    assert set(checkpoint.tensors) == set(tensors)
    assert len(checkpoint.tensors) == 3
    for name, value in tensors.items():
        assert checkpoint.tensors[name].dtype == value.dtype
        np.testing.assert_array_equal(checkpoint.tensors[name], value)
    tokenizer = checkpoint.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<s>", "</s>", (257, 259))
    assert tokenizer.decode(tokenizer.encode("Grüße <s>12")) == "Grüße 12"
    assert checkpoint.chat_template is None


def test_shards_are_read_through_their_index(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    save_file({"a": np.zeros(2, np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones(3, np.float32)}, folder / "model-00002-of-00002.safetensors")
    save_file({"stray": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = read_huggingface(folder).tensors
    assert set(tensors) == {"a", "b"}
    np.testing.assert_array_equal(tensors["b"], np.ones(3))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is cut off, missing"):
        read_huggingface(folder)


def test_model_safetensors_come_before_other_files(tmp_path):
    folder = write_folder(tmp_path / "model")
    save_file({"layers.0": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    assert set(read_huggingface(folder).tensors) == {"a"}
    (folder / "model.safetensors").unlink()
    assert set(read_huggingface(folder).tensors) == {"layers.0"}


def test_generation_config_decides_what_ends_an_answer(tmp_path):
    folder = write_folder(tmp_path / "model", generation_config={"eos_token_id": [258, 257]})
    assert read_huggingface(folder).tokenizer.eos_token_ids == (257, 258)
    folder = write_folder(tmp_path / "null", generation_config={"eos_token_id": None})
    assert read_huggingface(folder).tokenizer.eos_token_ids == (257, 259)


def test_special_tokens_may_be_written_as_objects_or_be_missing(tmp_path):
    settings = {"bos_token": None, "eos_token": {"content": "<end>", "lstrip": False}}
    folder = write_folder(tmp_path / "model", tokenizer_config=settings)
    tokenizer = read_huggingface(folder).tokenizer
    assert (tokenizer.bos_token_id, tokenizer.bos_token, tokenizer.eos_token_ids) == (None, "", (258, 259))
    folder = write_folder(tmp_path / "absent", tokenizer_config={})
    assert read_huggingface(folder).tokenizer.bos_token == "<s>"
    folder = write_folder(tmp_path / "bare", tokenizer_config=None, config={"architectures": []})
    tokenizer = read_huggingface(folder).tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())


def test_the_chat_template_may_be_in_any_of_its_places(tmp_path):
    folder = write_folder(tmp_path / "a", tokenizer_config={"chat_template": "one"})
    assert read_huggingface(folder).chat_template == "one"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = write_folder(tmp_path / "b", tokenizer_config={"chat_template": several})
    assert read_huggingface(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert read_huggingface(folder).chat_template == "file"


def test_incomplete_and_damaged_folders_say_what_is_wrong(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").rename(folder / "t")
    with pytest.raises(ValueError, match=r"model has no tokenizer\.json"):
        read_huggingface(folder)
    (folder / "t").rename(folder / "tokenizer.json")

    weights = folder / "model.safetensors"
    contents = weights.read_bytes()
    for size in (0, 5, 40, len(contents) - 1):
        weights.write_bytes(contents[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is cut off, missing or no safetensors file"):
            read_huggingface(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file: fetch its weights"):
        read_huggingface(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pickles, which are not read: convert them"):
        read_huggingface(folder)

    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no valid JSON"):
        read_huggingface(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, got a list"):
        read_huggingface(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_huggingface(folder)


def test_weights_that_are_not_floats_are_refused(tmp_path):
    tensors = {"a": np.ones(3, np.float32), "b": np.ones(3, np.int8)}
    checkpoint = read_huggingface(write_folder(tmp_path / "model", tensors))
    assert checkpoint.tensors["a"].dtype == np.float32
    with pytest.raises(ValueError, match="tensor b is I8; supported are F32, F16, BF16"):
        checkpoint.tensors["b"]
    folder = write_folder(tmp_path / "q", config={**CONFIG, "quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ValueError, match="awq-quantised weights"):
        read_huggingface(folder)
    folder = write_folder(tmp_path / "null", config={**CONFIG, "quantization_config": None})
    assert set(read_huggingface(folder).tensors) == {"a"}
