"""Makes tests/data/llama_*.npz: tiny random Llamas of transformers and the logits they give.

    pip install torch==2.13.0 transformers && python tests/goldens/make_llama.py

The default initialisation would make blind goldens (a wrong RoPE base moves its logits by 0.003), so every
parameter is drawn again: matrices around 0, biases and norms around 1.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

DATA = Path(__file__).parent.parent / "data"
PROMPT_TOKENS = 72
LOGIT_ROWS = (0, 1, 15, 16, 40, 71)
MATRIX_STD = 0.2
VECTOR_STD = 0.3

COMMON = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
VARIANTS = {
    "plain": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "llama3": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 6,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
    },
}


def make(name: str, variant: dict) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**COMMON | variant, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, VECTOR_STD)
            else:
                parameter.normal_(0.0, MATRIX_STD)
        tokens = torch.randint(COMMON["vocab_size"], (1, PROMPT_TOKENS))
        logits = model(tokens).logits[0, list(LOGIT_ROWS)]
    state = {
        key: value
        for key, value in model.state_dict().items()
        if not (config.tie_word_embeddings and "lm_head" in key)
    }
    described = COMMON | variant | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    np.savez_compressed(
        DATA / f"llama_{name}.npz",
        config=json.dumps(described),
        tokens=tokens[0].numpy().astype(np.int32),
        rows=np.array(LOGIT_ROWS, np.int32),
        logits=logits.numpy(),
        **{key: value.numpy() for key, value in state.items()},
    )
    print(name, "logits of size", float(logits.abs().mean()), "transformers", transformers.__version__)


if __name__ == "__main__":
    for name, variant in VARIANTS.items():
        make(name, variant)
