"""The golden models written as GGUF, by llama.cpp's names and layouts, come back as they were."""

import dataclasses
import re

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter

from jaxcache.models.config import ModelConfig
from jaxcache.models.grouping import LayerKind
from jaxcache.models.loading import read_gguf
from jaxcache.models.loading.gguf_file import expand, parse_gguf
from tests.models.model_files import TOKENS, permute
from tests.models.test_families import golden_of

STEMS = {
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "mixtral": "llama",
    "gemma2": "gemma2", "gemma3": "gemma3", "gpt_oss": "gpt-oss",
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
AROUND_MLP = {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def written(name, config, tensors):
    """What a converter makes of Hugging Face's tensors: GGUF names and arrays."""
    gemma = name.startswith("gemma")
    names = NAMES | (AFTER_ATTENTION | AROUND_MLP if gemma else AFTER_ATTENTION if name == "gpt_oss" else {})
    experts = {}
    for key, value in tensors.items():
        array = value.astype(np.float32)
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", key)
        prefix, rest = (f"blk.{layer[1]}.", layer[2]) if layer else ("", key)
        one = re.match(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", rest)
        if one:
            experts.setdefault(f"{prefix}ffn_{EXPERTS[one[2]]}_exps.weight", {})[int(one[1])] = array
        elif rest.startswith("mlp.experts."):
            end = "bias" if rest.endswith("_bias") else "weight"
            array = array if end == "bias" else array.swapaxes(1, 2)
            if "down" in rest:
                yield f"{prefix}ffn_down_exps.{end}", array
            else:
                yield f"{prefix}ffn_gate_exps.{end}", array[:, ::2]
                yield f"{prefix}ffn_up_exps.{end}", array[:, 1::2]
        else:
            stem, end = (rest, "weight") if rest.endswith("sinks") else rest.rsplit(".", 1)
            if name == "mixtral" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                array = permute(array, config.num_heads if "q_proj" in stem else config.num_kv_heads)
            if gemma and "norm" in stem:
                array = array + 1
            yield f"{prefix}{names[stem]}.{end}", array
    for key, by_expert in experts.items():
        yield key, np.stack([by_expert[n] for n in sorted(by_expert)])


def write(path, name):
    golden = golden_of(name)
    c, e = golden.config, golden.config.experts
    writer = GGUFWriter(path, STEMS[name])
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_position)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    if c.rope.kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(c.rope.kind))
        writer.add_rope_scaling_factor(c.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(c.rope.original_max_position)
    if name in ("gemma2", "gemma3", "gpt_oss"):
        writer.add_sliding_window(16)
        if name == "gemma3":
            windowed = [kind.size is not None for kind in c.layer_kinds]
            writer.add_array("gemma3.attention.sliding_window_pattern", windowed)
    if c.attention_soft_cap:
        writer.add_attn_logit_softcapping(c.attention_soft_cap)
        writer.add_final_logit_softcapping(c.final_soft_cap)
    if e:
        writer.add_expert_count(e.num_experts)
        writer.add_expert_used_count(e.experts_per_token)
        writer.add_expert_feed_forward_length(e.inner_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges([])
    for key, array in written(name, c, golden.tensors):
        writer.add_tensor(key, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


UNSAID = {
    "qwen2": {"layer_kinds": (LayerKind(),) * 3},
    "qwen3": {"rope": {"beta_fast": 32.0}},
    "qwen3_moe": {"experts": {"normalize": True}},
    "mixtral": {"layer_kinds": (LayerKind(),) * 2},
    "gemma2": {"sm_scale": 8**-0.5},
    "gemma3": {"sm_scale": 8**-0.5, "local_rope": {"theta": 10000.0}},
    "gpt_oss": {"rope": {"beta_fast": 32.0}, "experts": {"swiglu_limit": 7.0}},
}
"""What a GGUF file leaves to the program that reads it, and what is taken then."""


@pytest.mark.parametrize("name", STEMS)
def test_a_golden_model_comes_back_from_gguf(tmp_path, name):
    golden, path = golden_of(name), tmp_path / "m.gguf"
    write(path, name)
    checkpoint = read_gguf(path)
    assert checkpoint.config["model_type"] == golden.hf_config["model_type"]
    assert checkpoint.config["architectures"] == golden.hf_config["architectures"]
    expected = golden.config
    for field, value in UNSAID.get(name, {}).items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(expected, field), **value)
        expected = dataclasses.replace(expected, **{field: value})
    assert ModelConfig.from_hf(checkpoint.config) == expected
    assert set(checkpoint.tensors) == set(golden.tensors)
    for key, array in golden.tensors.items():
        read = checkpoint.tensors[key]
        if "norm" in key:
            np.testing.assert_allclose(read, array.astype(np.float32), atol=1e-6, err_msg=key)
        else:
            np.testing.assert_array_equal(read, array.astype(np.float32), err_msg=key)


def test_one_expert_of_quantised_weights_is_expanded_alone(tmp_path):
    path = tmp_path / "m.gguf"
    values = np.random.default_rng(0).normal(size=(3, 4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = parse_gguf(path)
    whole = expand(file, "t")
    for nth in range(3):
        np.testing.assert_array_equal(expand(file, "t", nth), whole[nth])
    assert np.abs(whole - values).max() < 0.05
