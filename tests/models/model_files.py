"""Small models on disk, for the tests of loading."""

import json

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxcache.models.tokenizer import BYTE_OF_CHARACTER

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, INNER, VOCABULARY = 64, 4, 2, 16, 2, 96, 260
TOKENS = [*sorted(BYTE_OF_CHARACTER), "<s>", "<end>", "x1", "x2"]


def shapes():
    """Of a small Llama, by Hugging Face name and by GGUF name."""
    yield "model.embed_tokens.weight", "token_embd.weight", (VOCABULARY, WIDTH)
    yield "model.norm.weight", "output_norm.weight", (WIDTH,)
    for i in range(LAYERS):
        hf, ours = f"model.layers.{i}", f"blk.{i}"
        yield f"{hf}.input_layernorm.weight", f"{ours}.attn_norm.weight", (WIDTH,)
        yield f"{hf}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight", (WIDTH,)
        yield f"{hf}.self_attn.q_proj.weight", f"{ours}.attn_q.weight", (HEADS * HEAD_DIM, WIDTH)
        yield f"{hf}.self_attn.k_proj.weight", f"{ours}.attn_k.weight", (KV_HEADS * HEAD_DIM, WIDTH)
        yield f"{hf}.self_attn.v_proj.weight", f"{ours}.attn_v.weight", (KV_HEADS * HEAD_DIM, WIDTH)
        yield f"{hf}.self_attn.o_proj.weight", f"{ours}.attn_output.weight", (WIDTH, HEADS * HEAD_DIM)
        yield f"{hf}.mlp.gate_proj.weight", f"{ours}.ffn_gate.weight", (INNER, WIDTH)
        yield f"{hf}.mlp.up_proj.weight", f"{ours}.ffn_up.weight", (INNER, WIDTH)
        yield f"{hf}.mlp.down_proj.weight", f"{ours}.ffn_down.weight", (WIDTH, INNER)


def permute(weight, heads):
    """What a converter to GGUF does to the rows of Llama's Q and K."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(path, *, architecture="llama", tensors=None, change=None, skip=(), extra=()):
    """A small random model; returns its tensors by Hugging Face name. `change(writer)` adds fields."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    if "tokenizer" not in skip:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * 256 + [3, 3, 1, 1])
        writer.add_token_merges([])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_chat_template("{{ messages[0].content }}")
    if change:
        change(writer)
    expected = {}
    for hf, ours, shape in tensors or shapes():
        weight = rng.normal(size=shape).astype(np.float32)
        expected[hf] = weight
        if architecture == "llama" and ".q_proj" in hf:
            weight = permute(weight, HEADS)
        if architecture == "llama" and ".k_proj" in hf:
            weight = permute(weight, KV_HEADS)
        writer.add_tensor(ours, weight)
    for name, weight in extra:
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 259, "bos_token_id": 256}


def write_tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<end>", "<other>")])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_folder(folder, tensors=None, **files):
    """A model folder; `files` by name without `.json` hold what goes in them, None leaves a file out."""
    folder.mkdir(exist_ok=True)
    contents = {"config": CONFIG, "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}, **files}
    for name, value in contents.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    write_tokenizer(folder)
    save_file({"a": np.ones((2, 3), np.float32)} if tensors is None else tensors, folder / "model.safetensors")
    return folder
