"""What is read from a `config.json`: older spellings, defaults, what is refused. Which layers make a group."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from jaxcache.models.config import ExpertsConfig, ModelConfig, RecurrentConfig
from jaxcache.models.grouping import FULL, RECURRENT, LayerKind, group_layers, layer_places, period
from jaxcache.models.loading import load_model, restore_checkpoint, save_checkpoint
from jaxcache.models.loading.families import FAMILIES, family_of
from jaxcache.models.rope import RopeConfig
from tests.models.model_files import write_folder
from tests.models.test_families import NAMES, Groups, check, golden_of

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
GEMMA_3_1B = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "attention_bias": False,
}  # fmt: skip
GEMMA_2_27B = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 4608, "intermediate_size": 36864,
    "num_hidden_layers": 46, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144, "sliding_window": 4096, "rope_theta": 10000.0,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "rms_norm_eps": 1e-5,
    "rope_theta": 150000, "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
    "max_position_embeddings": 131072, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
QWEN_2_5_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
    "max_position_embeddings": 32768, "max_window_layers": 28,
    "sliding_window": 131072, "use_sliding_window": False,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
RECURRENT_GEMMA_2B = {
    "model_type": "recurrent_gemma", "vocab_size": 256000, "hidden_size": 2560, "intermediate_size": 15360,
    "num_hidden_layers": 26, "num_attention_heads": 10, "num_key_value_heads": 1, "lru_width": 2560,
    "attention_window_size": 2048, "conv1d_width": 4, "logits_soft_cap": 30.0, "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0, "block_types": ["recurrent", "recurrent", "attention"],
}  # fmt: skip


def test_gemma_3_1b():
    config = ModelConfig.from_hf(GEMMA_3_1B)
    assert config.rope == RopeConfig(1000000)
    assert config.local_rope == RopeConfig(10000)
    assert (
        config.layer_kinds
        == ((LayerKind("sliding_window", 512),) * 5 + (FULL,)) * 4 + (LayerKind("sliding_window", 512),) * 2
    )
    assert config.qk_norm
    assert config.tie_embeddings
    assert config.sm_scale == 1 / 16
    assert config.embed_scale == 1152**0.5
    assert (config.attention_soft_cap, config.final_soft_cap) == (None, None)
    assert [len(group) for group in config.layer_groups] == [4, 4, 4, 4, 4, 3, 3]
    assert (config.kv_layers, config.state_layers) == (4, 0)


def test_gemma_3_4b_stretches_only_the_rope_of_full_attention():
    scaling = {"rope_type": "linear", "factor": 8.0}
    older = ModelConfig.from_hf(GEMMA_3_1B | {"rope_scaling": scaling})
    assert older.rope == RopeConfig(1000000, "linear", factor=8.0)
    assert older.local_rope == RopeConfig(10000)
    by_type = {
        "full_attention": scaling | {"rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    dropped = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    newer = {key: value for key, value in GEMMA_3_1B.items() if key not in dropped}
    assert ModelConfig.from_hf(newer | {"rope_parameters": by_type}) == older


def test_gemma_2_27b_scales_attention_by_the_width_per_head():
    config = ModelConfig.from_hf(GEMMA_2_27B)
    assert config.sm_scale == 144**-0.5
    assert config.activation == "gelu_pytorch_tanh"
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert config.layer_kinds == (LayerKind("sliding_window", 4096), FULL) * 23
    assert [len(group) for group in config.layer_groups] == [23, 23]


def test_gpt_oss_20b():
    config = ModelConfig.from_hf(GPT_OSS_20B)
    assert config.sinks
    assert config.qkv_bias
    assert config.out_bias
    assert config.experts == ExpertsConfig(32, 4, 2880, bias=True, clamped=True)
    assert config.rope.attention_factor == pytest.approx(0.1 * np.log(32) + 1)
    assert not config.rope.truncate
    bare = {key: value for key, value in GPT_OSS_20B.items() if key not in ("rope_scaling", "layer_types")}
    assert ModelConfig.from_hf(bare) == config


def test_qwen_2_5_has_a_window_only_where_it_says_that_it_uses_it():
    config = ModelConfig.from_hf(QWEN_2_5_7B)
    assert (config.head_dim, config.qkv_bias, config.out_bias) == (128, True, False)
    assert config.layer_groups == (tuple(range(28)),)
    using = ModelConfig.from_hf(QWEN_2_5_7B | {"use_sliding_window": True, "max_window_layers": 21})
    assert using.layer_kinds == (FULL,) * 21 + (LayerKind("sliding_window", 131072),) * 7
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert ModelConfig.from_hf(QWEN_2_5_7B | {"rope_scaling": yarn}).rope.truncate


def test_yarn_stretches_the_context_unless_the_config_has_it_stretched_already():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = QWEN_2_5_7B | {"rope_scaling": yarn}
    assert ModelConfig.from_hf(config).max_position == 131072
    assert ModelConfig.from_hf(config | {"max_position_embeddings": 131072}).max_position == 131072
    assert ModelConfig.from_hf(config | {"max_position_embeddings": 163840}).max_position == 163840
    older = {"type": "yarn", "factor": 4.0}
    assert ModelConfig.from_hf(QWEN_2_5_7B | {"rope_scaling": older}).max_position == 131072
    assert ModelConfig.from_hf(GPT_OSS_20B).max_position == 131072
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = QWEN_2_5_7B | {"rope_scaling": llama3 | {"original_max_position_embeddings": 8192}}
    assert ModelConfig.from_hf(config).max_position == 32768


def test_mistral_has_a_window_unless_it_is_null():
    config = SMALL | {"model_type": "mistral"}
    assert ModelConfig.from_hf(config).layer_kinds == (LayerKind("sliding_window", 4096),) * 4
    assert ModelConfig.from_hf(config | {"sliding_window": None}).layer_kinds == (FULL,) * 4
    assert ModelConfig.from_hf(config | {"sliding_window": 8}).layer_groups == ((0, 1, 2, 3),)


def test_recurrent_gemma_2b():
    config = ModelConfig.from_hf(RECURRENT_GEMMA_2B)
    assert config.recurrent == RecurrentConfig(2560, 4)
    assert config.intermediate_size == 7680
    assert config.rope.rotated_lanes(config.head_dim) == 128
    assert config.embed_scale == 50.5
    assert config.layer_kinds[:3] == (RECURRENT, RECURRENT, LayerKind("sliding_window", 2048))
    assert [len(group) for group in config.layer_groups] == [6, 6, 6, 8]
    assert (config.kv_layers, config.state_layers) == (8, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 4},
            r"\['chunked_attention'\] are not",
        ),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "1 layer kinds for 4 layers"),
        ({"model_type": "gemma2", "sliding_window": 0}, "positive number of tokens, got 0"),
        (
            {"model_type": "gemma2", "query_pre_attn_scalar": "x"},
            "query_pre_attn_scalar must be a positive number",
        ),
        (
            {"model_type": "gemma2", "final_logit_softcapping": -1},
            "final_soft_cap must be a positive number, got -1",
        ),
        ({"model_type": "mistral", "layer_types": ["a", "b"]}, "mistral with layers of several types"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0], "num_experts": 4}, "dense layers between those with"),
        ({"model_type": "qwen3_moe"}, "num_experts must be a positive integer, got None"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "to 3 of 2 experts"),
        (
            {"model_type": "recurrent_gemma", "block_types": ["mamba"]},
            "block_types .* only recurrent and attention",
        ),
        ({"model_type": "recurrent_gemma", "lru_width": 66}, "66 is no multiple of num_attention_heads 4"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn"}}, "rope type 'yarn' needs factor"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": -2}}, "needs original_max_position"),
        ({"model_type": "recurrent_gemma", "partial_rotary_factor": 1.5}, "must be at most 1, got 1.5"),
        ({"model_type": "recurrent_gemma", "partial_rotary_factor": 0.2}, "must rotate an even part of 16 lanes"),
    ],
)
def test_what_is_not_supported_says_so(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(SMALL | changes)


W, C = LayerKind("sliding_window", 8), LayerKind("chunked_local", 8)


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ([FULL] * 3, [[0, 1, 2]]),
        ([W] * 2, [[0, 1]]),
        ([W, FULL] * 2, [[1, 3], [0, 2]]),
        # 3 windows are half as many again as 2 full layers: groups of 2.
        ([W, FULL, W, FULL, W], [[1, 3], [0, 4], [2]]),
        # 4 against 3 is less than that: groups of 4, one of them with room to spare.
        ([W, FULL, W, FULL, W, FULL, W], [[1, 3, 5], [0, 2, 4, 6]]),
        ([W, W, W, FULL] * 2, [[3, 7], [0, 4], [1, 5], [2, 6]]),
        ([RECURRENT, RECURRENT, W] * 2, [[0, 3], [1, 4], [2, 5]]),
        ([C, W, FULL], [[2], [0], [1]]),
        ([W, LayerKind("sliding_window", 9)], [[0], [1]]),
        ([], []),
    ],
)
def test_groups(kinds, groups):
    found = group_layers(kinds)
    assert [list(group) for group in found] == groups
    places = layer_places(found)
    assert sorted(set(places)) == sorted(places)
    assert all(found[place.group][place.layer] == layer for layer, place in enumerate(places))


@pytest.mark.parametrize(
    ("kinds", "length"), [("aaaa", 1), ("aab", 0), ("abab", 2), ("aabaabaa", 3), ("abcab", 0), ("a", 0), ("", 0)]
)
def test_period(kinds, length):
    assert period([{"a": W, "b": FULL, "c": RECURRENT}[kind] for kind in kinds]) == length


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("global",), "layer kind 'global' is not one of full"),
        (("sliding_window",), "sliding_window layer needs a positive number of tokens, got None"),
        (("full", 3), "a full layer has no size, got 3"),
    ],
)
def test_layer_kinds_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerKind(*arguments)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaModel"), ("qwen3_moe", "Qwen3MoeModel"), ("gpt_oss", "GptOssModel"),
     ("gemma3_text", "Gemma3TextModel"), ("recurrent_gemma", "RecurrentGemmaModel")],
)  # fmt: skip
def test_base_models_are_known_by_their_architecture(model_type, architecture):
    described = {"model_type": model_type, "architectures": [architecture]}
    assert family_of(described) is FAMILIES[model_type]
    config = SMALL | described | {"num_experts": 8}
    assert ModelConfig.from_hf(config | {"tie_word_embeddings": True}).has_head
    headless = ModelConfig.from_hf(config | {"tie_word_embeddings": False})
    assert (headless.has_head, headless.tie_embeddings) == (False, True)
    with pytest.raises(ValueError, match=r"LlamaEncoderModel .* is not supported"):
        family_of(described | {"architectures": ["LlamaEncoderModel"]})


def test_a_base_model_without_a_head_is_saved_as_one(tmp_path):
    golden = golden_of("qwen3")
    tensors = {name.removeprefix("model."): value for name, value in golden.tensors.items()}
    config = golden.hf_config | {"tie_word_embeddings": False}
    loaded = load_model(write_folder(tmp_path / "folder", tensors, config=config))
    assert not loaded.config.has_head
    save_checkpoint(tmp_path / "saved", loaded)
    assert restore_checkpoint(tmp_path / "saved").config == loaded.config


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_and_a_checkpoint_hold_the_same_model(tmp_path, name):
    golden = golden_of(name)
    folder = write_folder(tmp_path / "folder", golden.tensors, config=golden.hf_config)
    loaded = load_model(folder, dtype="float32")
    assert loaded.config == golden.config
    save_checkpoint(tmp_path / "saved", loaded)
    restored = restore_checkpoint(tmp_path / "saved")
    for model in (loaded.model, restored.model):
        assert type(model) is golden.family
        same = jax.tree.map(np.array_equal, nnx.state(model), nnx.state(golden.model()))
        assert jax.tree.all(same), json.dumps(jax.tree.leaves(same))


def test_a_restored_model_computes(tmp_path):
    golden = golden_of("gemma2")
    folder = write_folder(tmp_path / "folder", golden.tensors, config=golden.hf_config)
    save_checkpoint(tmp_path / "saved", load_model(folder))
    groups = Groups(restore_checkpoint(tmp_path / "saved").model).fresh()
    check(golden, groups.step((golden.tokens, 0, groups.tables(1, 2, 3, 4, 5, 6))))
