import dataclasses
import json
import logging
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxcache.models.loading import (
    cache_home,
    load_model,
    read_gguf,
    registry,
    restore_checkpoint,
    save_checkpoint,
)
from tests.models.model_files import write_folder, write_gguf


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model_file(tmp_path):
    write_gguf(tmp_path / "small.gguf")
    return tmp_path / "small.gguf"


@pytest.fixture
def loaded(model_file):
    return load_model(model_file, cache=False)


def arrays(loaded):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(loaded.model))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_same(left, right):
    assert arrays(left).keys() == arrays(right).keys()
    for name, array in arrays(left).items():
        np.testing.assert_array_equal(arrays(right)[name], array, err_msg=name)
    assert left.config == right.config
    assert (left.eos_token_ids, left.chat_template) == (right.eos_token_ids, right.chat_template)
    text = "Grüße <s> 12"
    assert left.tokenizer.encode(text) == right.tokenizer.encode(text)
    assert left.tokenizer.bos_token == right.tokenizer.bos_token
    assert left.tokenizer.special_ids == right.tokenizer.special_ids


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_saved_is_restored(loaded, tmp_path):
    save_checkpoint(tmp_path / "saved", loaded)
    assert_same(restore_checkpoint(tmp_path / "saved"), loaded)
    assert_same(load_model(tmp_path / "saved", dtype="float32"), loaded)
    assert restore_checkpoint(tmp_path / "saved").name == "small"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_restore_reads_the_saved_weights_not_those_of_a_fresh_model(loaded, tmp_path):
    graph, state = nnx.split(loaded.model)
    changed = dataclasses.replace(loaded, model=nnx.merge(graph, jax.tree.map(lambda x: x + 1, state)))
    save_checkpoint(tmp_path / "saved", changed)
    assert_same(restore_checkpoint(tmp_path / "saved"), changed)


def test_an_existing_path_is_kept_unless_told_otherwise(loaded, tmp_path):
    path = tmp_path / "saved"
    path.mkdir()
    (path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="saved exists: choose another path, or overwrite=True"):
        save_checkpoint(path, loaded)
    assert (path / "mine").read_text() == "precious"
    save_checkpoint(path, loaded, overwrite=True)
    assert not (path / "mine").exists()
    assert_same(restore_checkpoint(path), loaded)


def test_a_save_that_fails_leaves_nothing(loaded, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "saved", loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_weights_change_their_dtype_on_the_way(loaded, tmp_path):
    save_checkpoint(tmp_path / "saved", loaded)
    restored = restore_checkpoint(tmp_path / "saved", dtype=jnp.bfloat16)
    direct = load_model(tmp_path / "small.gguf", dtype=jnp.bfloat16, cache=False)
    assert_same(restored, direct)
    assert any(array.dtype == jnp.bfloat16 for array in arrays(direct).values())


def test_restore_onto_one_sharding_for_all(loaded, tmp_path):
    save_checkpoint(tmp_path / "saved", loaded)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    restored = restore_checkpoint(tmp_path / "saved", sharding=everywhere)
    assert_same(restored, loaded)
    assert all(array.sharding == everywhere for array in arrays(restored).values())


def test_restore_and_convert_onto_a_sharding_per_array(loaded, tmp_path):
    save_checkpoint(tmp_path / "saved", loaded)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def last_axis(array):
        axes = [None] * (array.ndim - 1) + ["x" if array.shape[-1] % 4 == 0 else None]
        return NamedSharding(mesh, PartitionSpec(*axes))

    sharding = jax.tree.map(last_axis, nnx.state(loaded.model))
    for model in (
        restore_checkpoint(tmp_path / "saved", sharding=sharding),
        load_model(tmp_path / "small.gguf", cache=False, sharding=sharding),
    ):
        assert_same(model, loaded)
        for array in arrays(model).values():
            assert array.sharding == last_axis(array)
    assert any(len({str(s.index) for s in a.addressable_shards}) == 4 for a in arrays(model).values())


def test_a_sharding_for_other_arrays_is_refused(loaded, tmp_path):
    save_checkpoint(tmp_path / "saved", loaded)
    place = jnp.zeros(()).sharding
    with pytest.raises(ValueError, match=r"the sharding is for other arrays .*embed\.table"):
        restore_checkpoint(tmp_path / "saved", sharding={"weight": place})


def test_folders_that_cannot_be_restored_say_why(loaded, tmp_path):
    path = tmp_path / "saved"
    with pytest.raises(ValueError, match=r"saved is no checkpoint of jaxcache's: it has no jaxcache\.json"):
        restore_checkpoint(path)
    save_checkpoint(path, loaded)

    manifest = json.loads((path / "jaxcache.json").read_text())
    (path / "jaxcache.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="has format 99, but this version reads 2"):
        restore_checkpoint(path)
    name = next(iter(manifest["params"]))
    (path / "jaxcache.json").write_text(json.dumps({**manifest, "params": {**manifest["params"], name: [3]}}))
    with pytest.raises(ValueError, match="was written for another layout of this model"):
        restore_checkpoint(path)
    (path / "jaxcache.json").write_text("{")
    with pytest.raises(ValueError, match=r"jaxcache\.json is no valid JSON"):
        restore_checkpoint(path)


def test_every_damaged_or_missing_file_is_noticed(loaded, tmp_path):
    path = tmp_path / "saved"
    save_checkpoint(path, loaded)
    for file in files_of(path):
        if file.name == "jaxcache.json":
            continue
        contents = file.read_bytes()
        for changed in (contents[:-1], bytes([contents[0] ^ 1]) + contents[1:], None):
            file.unlink()
            if changed is not None:
                file.write_bytes(changed)
            with pytest.raises(ValueError, match=f"is damaged: .*{file.name}.* missing or not as written"):
                restore_checkpoint(path)
            file.write_bytes(contents)
    assert_same(restore_checkpoint(path), loaded)


def test_converted_weights_come_from_the_cache_the_next_time(model_file, home, monkeypatch):
    first = load_model(model_file)
    monkeypatch.setattr(registry, "read_gguf", None)
    second = load_model(model_file)
    assert_same(first, second)
    assert first.name == second.name == "small"
    renamed = model_file.rename(model_file.with_name("other.gguf"))
    assert load_model(renamed).name == "other"
    assert len([*(home / "models").iterdir()]) == 1


def test_the_cache_goes_by_contents_and_dtype(tmp_path, home):
    write_gguf(tmp_path / "m.gguf")
    first = load_model(tmp_path / "m.gguf")
    load_model(tmp_path / "m.gguf", dtype="bfloat16")
    contents = bytearray((tmp_path / "m.gguf").read_bytes())
    contents[-1] ^= 0x01
    (tmp_path / "m.gguf").write_bytes(contents)
    changed = load_model(tmp_path / "m.gguf")
    assert len([*(home / "models").iterdir()]) == 3
    differing = [name for name, a in arrays(first).items() if not np.array_equal(a, arrays(changed)[name])]
    assert len(differing) == 1


def test_a_damaged_cache_is_made_anew(model_file, home, caplog):
    first = load_model(model_file)
    biggest = max(files_of(home), key=lambda path: path.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING, "jaxcache"):
        assert_same(load_model(model_file), first)
    assert "made anew" in caplog.text
    assert "is damaged" in caplog.text
    caplog.clear()
    assert_same(load_model(model_file), first)
    assert caplog.text == ""
    assert len([*(home / "models").iterdir()]) == 1


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, r"it has no jaxcache\.json"),
        ("", r"jaxcache\.json is no valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"format": 2}', r"jaxcache\.json is incomplete"),
        ('{"format": 1}', "has format 1"),
    ],
)
def test_a_cache_folder_without_a_sound_manifest_is_made_anew(model_file, home, caplog, contents, message):
    first = load_model(model_file)
    (folder,) = (home / "models").iterdir()
    (folder / "jaxcache.json").unlink()
    if contents is not None:
        (folder / "jaxcache.json").write_text(contents)
    assert_same(load_model(model_file), first)
    assert re.search(message, caplog.text)
    assert "made anew" in caplog.text
    caplog.clear()
    load_model(model_file)
    assert caplog.text == ""


def test_a_cache_that_cannot_be_written_is_no_obstacle(model_file, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCACHE_HOME", str(tmp_path / "file"))
    load_model(model_file)
    assert "cannot be kept" in caplog.text


def test_a_disk_that_is_full_is_no_obstacle(model_file, loaded, home, monkeypatch, caplog):
    """tensorstore says it with a ValueError, and those of its writers that have not failed yet write on."""
    remove, removed = shutil.rmtree, []

    def fail(*args, **kwargs):
        raise ValueError("OUT_OF_RANGE: Failed to write 294022 bytes: No space left on device")

    def remove_while_others_write(folder, **options):
        remove(folder, **options)
        removed.append(folder)
        if len(removed) == 1:
            folder.mkdir()
            (folder / "late").write_text("half")

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    monkeypatch.setattr(shutil, "rmtree", remove_while_others_write)
    assert_same(load_model(model_file), loaded)
    assert "cannot be kept" in caplog.text
    assert "the model is used all the same: OUT_OF_RANGE" in caplog.text
    assert [*(home / "models").iterdir()] == []


def test_without_cache_nothing_is_written(model_file, home):
    load_model(model_file, cache=False)
    assert not home.exists()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXCACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "jaxcache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_home()) == "/x/jaxcache"
    monkeypatch.setenv("JAXCACHE_HOME", "/y")
    assert str(cache_home()) == "/y"


def test_a_hugging_face_folder_gives_the_same_model_as_the_gguf_file(model_file, tmp_path):
    checkpoint = read_gguf(model_file)
    folder = write_folder(tmp_path / "hf", dict(checkpoint.tensors), config=checkpoint.config)
    left, right = load_model(model_file, cache=False), load_model(folder)
    assert arrays(left).keys() == arrays(right).keys()
    for name, array in arrays(left).items():
        np.testing.assert_array_equal(arrays(right)[name], array)
    assert left.config == right.config


@pytest.mark.parametrize("dtype", ["int8", "float33", "float64"])
def test_weights_of_other_types_are_refused(model_file, dtype):
    with pytest.raises(ValueError, match=r"weights cannot be .*: choose one of float32, bfloat16, float16"):
        load_model(model_file, dtype=dtype)


def test_an_unsupported_architecture_is_refused(tmp_path):
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    with pytest.raises(
        ValueError, match=r"MambaForCausalLM \(model_type 'mamba'\) is not supported.* model_type llama"
    ):
        load_model(write_folder(tmp_path / "mamba", config=config))
    config = {"architectures": ["LlamaForTokenClassification"], "model_type": "llama"}
    with pytest.raises(ValueError, match=r"LlamaForTokenClassification .*is not supported"):
        load_model(write_folder(tmp_path / "classifier", config=config))
