"""Reading models from GGUF files: Hugging Face's names and layouts for what is stored under GGUF's own."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcache.models.loading.checkpoint import Checkpoint
from jaxcache.models.loading.gguf_config import ARCHITECTURES, ROPE_FACTORS, read_config
from jaxcache.models.loading.gguf_file import GGUFFile, expand, parse_gguf
from jaxcache.models.loading.gguf_tokenizer import build_tokenizer

OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SPECIAL_TENSORS = {
    "gemma2": GEMMA_TENSORS,
    "gemma3_text": GEMMA_TENSORS,
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "qwen3_moe": {"ffn_gate_inp": "mlp.gate"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
}
"""By model_type, what differs from `LAYER_TENSORS`."""

EXPERT_TENSORS = {
    "qwen3_moe": (
        "mlp.experts",
        {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"},
    ),
    "mixtral": ("block_sparse_moe.experts", {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}),
}
"""By model_type: one tensor of all experts here, one tensor per expert there."""


def read_gguf(path: str | Path) -> Checkpoint:
    """The model in a GGUF file: config in Hugging Face's terms, lazily expanded weights, tokenizer, chat template.

    A `ValueError` for a missing, cut-off or foreign file and for an architecture that is not supported.
    """
    path = Path(path)
    file = parse_gguf(path)
    try:
        config = read_config(file)
        tensors = GGUFTensors(file, config)
        tokenizer = build_tokenizer(file.metadata)
        chat_template = file.metadata.get("tokenizer.chat_template")
        if not isinstance(chat_template, str | None):
            raise ValueError(f"tokenizer.chat_template is no text but {chat_template!r}")
    except KeyError as error:
        raise ValueError(f"{path} does not say {error.args[0]!r}, which its model needs") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"{path}: its metadata has a value that no model has ({error})") from error
    return Checkpoint(
        name=path.stem,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


class Source(NamedTuple):
    """What one of Hugging Face's tensors is made from."""

    names: tuple[str, ...]
    """GGUF's."""
    change: Callable[..., np.ndarray] | None = None
    """From those tensors; None takes the only one as it is."""
    expert: int | None = None
    """Only this part of them along the first axis."""


class GGUFTensors(Mapping[str, np.ndarray]):
    """Weights by Hugging Face name, expanded when asked for: float32, or as stored where that is f16 or bf16."""

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._sources: dict[str, Source] = {}
        for name in file.tensors:
            if name != ROPE_FACTORS:
                self._sources |= _sources(name, file, config)

    def __getitem__(self, name: str) -> np.ndarray:
        source = self._sources[name]
        arrays = [expand(self._file, stored, source.expert) for stored in source.names]
        return arrays[0] if source.change is None else source.change(*arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _sources(name: str, file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Source]:
    """Which of Hugging Face's tensors the GGUF tensor `name` is, or is the first part of."""
    model_type = config["model_type"]
    change = _minus_one if model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight") else None
    if name in OTHER_TENSORS:
        return {OTHER_TENSORS[name]: Source((name,), change)}
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk":
        layer, kind, end = f"model.layers.{parts[1]}", parts[2], parts[3]
        if kind == "attn_sinks":
            return {f"{layer}.self_attn.sinks": Source((name,))}
        if model_type == "gpt_oss" and kind.endswith("_exps"):
            return _fused_experts(name, layer, kind, end)
        place, experts = EXPERT_TENSORS.get(model_type, ("", {}))
        if kind in experts:
            return {
                f"{layer}.{place}.{n}.{experts[kind]}.{end}": Source((name,), expert=n)
                for n in range(file.tensors[name].shape[0])
            }
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        if model_type in ("llama", "mixtral") and kind in heads:
            change = _Unpermuted(heads[kind])
        known = LAYER_TENSORS | SPECIAL_TENSORS.get(model_type, {})
        if kind in known:
            return {f"{layer}.{known[kind]}.{end}": Source((name,), change)}
    raise ValueError(f"tensor {name!r} is not part of any supported architecture ({', '.join(ARCHITECTURES)})")


def _minus_one(scale: np.ndarray) -> np.ndarray:
    """GGUF stores what Gemma's norms multiply with, Hugging Face what they add to one."""
    return scale - np.ones((), scale.dtype)


class _Unpermuted(NamedTuple):
    """Undoes how GGUF orders the rows of Llama's Q and K: pairs (i, i + half) of a head lie side by side there."""

    heads: int

    def __call__(self, weight: np.ndarray) -> np.ndarray:
        half = weight.shape[0] // self.heads // 2
        return weight.reshape(self.heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _fused_experts(name: str, layer: str, kind: str, end: str) -> dict[str, Source]:
    """gpt-oss's experts: gate and up are one tensor at Hugging Face, and weights are `[in, out]`."""
    suffix = "_bias" if end == "bias" else ""
    if kind == "ffn_down_exps":
        return {f"{layer}.mlp.experts.down_proj{suffix}": Source((name,), None if suffix else _transposed)}
    if kind == "ffn_up_exps":
        return {}
    fuse = _in_turns if suffix else _in_turns_transposed
    return {f"{layer}.mlp.experts.gate_up_proj{suffix}": Source((name, name.replace("_gate_", "_up_")), fuse)}


def _transposed(weight: np.ndarray) -> np.ndarray:
    return weight.swapaxes(1, 2)


def _in_turns(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """`[experts, n, ...]` twice to `[experts, 2 n, ...]`."""
    return np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])


def _in_turns_transposed(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return _transposed(_in_turns(gate, up))
