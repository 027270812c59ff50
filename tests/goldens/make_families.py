"""Makes tests/data/families/*.npz: tiny random models of transformers, as its own files name and shape their
weights, and the logits they give.

    pip install torch==2.13.0 transformers && python tests/goldens/make_families.py [family ...]

The default initialisation would make blind goldens, so every parameter is drawn again: matrices around 0, biases,
norms and sinks around 1 (norms that add 1 to their scale: around 0). Parameters are rounded to float16, which is
how they are stored; the logits are of the rounded ones, in float32.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

DATA = Path(__file__).parent.parent / "data" / "families"
PROMPT_TOKENS = 45
MATRIX_STD = 0.2
VECTOR_STD = 0.3

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 300.0}
COMMON = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": DEFAULT_ROPE,
    "sliding_window": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
GEMMA3 = {
    "num_hidden_layers": 8,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "query_pre_attn_scalar": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 800.0},
    },
}
FAMILIES = {
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN | {"truncate": True}}),
    "mistral": ("Mistral", {"num_hidden_layers": 3}),
    "gemma2": ("Gemma2", {
        "num_hidden_layers": 5, "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3_bidirectional": ("Gemma3", GEMMA3 | {"use_bidirectional_attention": True, "num_hidden_layers": 3,
                                                 "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gpt_oss": ("GptOss", {
        "num_hidden_layers": 5, "hidden_size": 24, "intermediate_size": 20, "rope_parameters": YARN,
        "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5,
    }),
    "qwen3_moe": ("Qwen3Moe", {
        "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False,
    }),
    "mixtral": ("Mixtral", {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "recurrent_gemma": ("RecurrentGemma", {
        "num_hidden_layers": 8, "lru_width": 24, "attention_window_size": 16, "hidden_size": 32,
        "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
    }),
}  # fmt: skip
DROPPED = {"head_dim", "sliding_window", "max_position_embeddings"}
"""Not taken by RecurrentGemma's config, which follows from others or has other names."""


def make(name: str, family: str, changes: dict) -> None:
    torch.manual_seed(0)
    settings = COMMON | changes
    if family == "RecurrentGemma":
        settings = {key: value for key, value in settings.items() if key not in DROPPED}
    text = "Text" if family == "Gemma3" else ""
    settings["layer_types"] = settings.get("layer_types", [])[: settings["num_hidden_layers"]] or None
    if settings["layer_types"] is None:
        del settings["layer_types"]
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    randomise(model)
    with torch.no_grad():
        tokens = torch.randint(config.vocab_size, (1, PROMPT_TOKENS))
        logits = model(tokens, use_cache=False).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        written = json.loads((Path(folder) / "config.json").read_text())
    DATA.mkdir(exist_ok=True)
    path = DATA / f"{name}.npz"
    np.savez_compressed(
        path,
        config=json.dumps(written),
        tokens=tokens[0].numpy().astype(np.int32),
        logits=logits.numpy(),
        **{key: value.astype(np.float16) for key, value in tensors.items()},
    )
    size = path.stat().st_size // 1000
    print(f"{name}: {size} kB, logits of size {logits.abs().mean():.2f}, transformers {transformers.__version__}")


def randomise(model: torch.nn.Module) -> None:
    added_to_one = {
        id(module.weight)
        for module in model.modules()
        if type(module).__name__.startswith(("Gemma", "RecurrentGemma"))
        and type(module).__name__.endswith("RMSNorm")
    }
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0 if id(parameter) in added_to_one else 1.0, VECTOR_STD)
            else:
                parameter.normal_(0.0, MATRIX_STD)
            parameter.copy_(parameter.half().float())


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        make(name, *FAMILIES[name])
