"""Reading GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The header is parsed here rather than by `gguf.GGUFReader`, which keeps a numpy view of every string (3 s for a
vocabulary of 49,152, here 0.1 s) and does not notice where a file is cut off. Blocks of quantised weights are
expanded by the `gguf` package.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxcache.models.loading.checkpoint import Checkpoint
from jaxcache.models.loading.gguf_tokenizer import build_tokenizer

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""struct codes of the metadata types."""

PLAIN_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""`general.architecture` -> Hugging Face's `architectures[0]` and `model_type`."""

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
OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The same in every Llama 3.1, 3.2 and 3.3; a GGUF keeps only the factors that follow from it."""


class TensorInfo(NamedTuple):
    """Where one tensor lies. `shape` is numpy's: GGUF lists dimensions the other way round."""

    shape: tuple[int, ...]
    type: int
    start: int
    num_bytes: int


class GGUFFile(NamedTuple):
    """Metadata and the tensors' places; `data` is the mapped file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap


def read_gguf(path: str | Path) -> Checkpoint:
    """The model in a GGUF file: config in Hugging Face's terms, lazily expanded weights, tokenizer, chat template.

    A `ValueError` for a missing, cut-off or foreign file and for an architecture that is not supported.
    """
    path = Path(path)
    file = parse_gguf(path)
    try:
        config = _config(file)
        tensors = GGUFTensors(file, config)
        tokenizer = build_tokenizer(file.metadata)
    except KeyError as error:
        raise ValueError(f"{path} does not say {error.args[0]!r}, which its model needs") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Checkpoint(
        name=path.stem,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


def parse_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file, every length checked against the file's size."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the path of a .gguf file")
    with path.open("rb") as stream:
        start = stream.read(4)
        if start != MAGIC:
            raise ValueError(f"{path} is no GGUF file: it starts with {start!r} instead of {MAGIC!r}")
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Header(data).read()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = len(MAGIC)

    def read(self) -> GGUFFile:
        version = self.scalar("I")
        if version & 0xFFFF == 0:
            raise ValueError("this GGUF file is big-endian: convert it to little-endian")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported: versions 2 and 3 are")
        num_tensors, num_fields = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(num_fields):
            name = self.string()
            metadata[name] = self.value(self.scalar("I"))
        if metadata.get("split.count", 1) > 1:
            raise ValueError("this is one part of a split model: join the parts with llama-gguf-split --merge")
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        base = -(-self.offset // alignment) * alignment
        return GGUFFile(metadata, dict(self.place(base, *info) for info in infos), self.data)

    def take(self, size: int) -> int:
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise ValueError(
                f"the file is cut off or damaged: its header reaches to byte {self.offset} and beyond, "
                f"but the file ends at {len(self.data)}. Fetch it again"
            )
        return start

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack_from("<" + code, self.data, self.take(size))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.take(size)
        return str(self.data[start : start + size], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in SCALARS:
                start = self.take(count * struct.calcsize(SCALARS[item]))
                return list(struct.unpack_from(f"<{count}{SCALARS[item]}", self.data, start))
            return [self.value(item) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"the file is damaged: metadata of type {kind}")
        return self.scalar(SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")

    def place(
        self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> tuple[str, TensorInfo]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except ValueError:
            raise ValueError(f"tensor {name} has type {kind}, which the gguf package does not know") from None
        num_bytes = math.prod(shape) // block * block_bytes
        info = TensorInfo(shape, kind, base + offset, num_bytes)
        if info.start + num_bytes > len(self.data):
            raise ValueError(
                f"the file is cut off: tensor {name} reaches to byte {info.start + num_bytes}, but the file ends "
                f"at {len(self.data)}. Fetch it again"
            )
        return name, info


class GGUFTensors(Mapping[str, np.ndarray]):
    """Weights by Hugging Face name, expanded when asked for: float32, or as stored where that is f16 or bf16."""

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._names: dict[str, str] = {}
        for name in file.tensors:
            if name != ROPE_FACTORS:
                self._names[_huggingface_name(name)] = name
        self._heads: dict[str, int] = {}
        if config["model_type"] == "llama":
            self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def __getitem__(self, name: str) -> np.ndarray:
        array = expand(self._file, self._names[name])
        projection = name.split(".")[-2]
        if projection in self._heads:
            array = _unpermute(array, self._heads[projection])
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def expand(file: GGUFFile, name: str) -> np.ndarray:
    """One tensor by its GGUF name, as floats."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    info = file.tensors[name]
    kind = GGMLQuantizationType(info.type)
    raw = np.frombuffer(file.data, np.uint8, info.num_bytes, info.start)
    if kind.name in PLAIN_DTYPES:
        array = raw.view(PLAIN_DTYPES[kind.name]).reshape(info.shape)
        return array.astype(np.float32) if kind.name == "F64" else array
    try:
        return dequantize(raw.reshape(*info.shape[:-1], -1), kind).reshape(info.shape)
    except NotImplementedError:
        raise ValueError(f"tensor {name} is {kind.name}, which the gguf package cannot expand to floats") from None


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo how GGUF orders the rows of Llama's Q and K: pairs (i, i + half) of a head lie side by side there."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _huggingface_name(name: str) -> str:
    if name in OTHER_TENSORS:
        return OTHER_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise ValueError(f"tensor {name!r} is not part of any supported architecture ({', '.join(ARCHITECTURES)})")


def _config(file: GGUFFile) -> dict[str, Any]:
    metadata = file.metadata
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if metadata.get(f"{architecture}.expert_count", 0):
        raise ValueError(f"{architecture} with a mixture of experts is not supported; take a dense model")
    heads = metadata[f"{architecture}.attention.head_count"]
    kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise ValueError("a number of heads that differs from layer to layer is not supported")
    width = metadata[f"{architecture}.embedding_length"]
    head_dim = metadata.get(f"{architecture}.attention.key_length", width // heads)
    rotated = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"RoPE over {rotated} of {head_dim} dimensions of a head is not supported, only over all")
    class_name, model_type = ARCHITECTURES[architecture]
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": metadata[f"{architecture}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{architecture}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(metadata[f"{architecture}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get(f"{architecture}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, architecture, head_dim),
        "max_position_embeddings": metadata[f"{architecture}.context_length"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _shortest(value: float) -> float:
    """A float32 as the decimal it was written from: 1e-5, not 9.99999974737875e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, architecture: str, head_dim: int) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`. Llama 3's is stored as one factor per frequency, and recognised from them."""
    metadata = file.metadata
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        factors = expand(file, ROPE_FACTORS)
        theta = metadata.get(f"{architecture}.rope.freq_base", 10000.0)
        scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_ROPE}
        if not np.allclose(factors, llama3_rope_factors(scaling, theta, head_dim), rtol=1e-3):
            raise ValueError(
                f"{ROPE_FACTORS} holds other factors than Llama 3's RoPE scaling, which is all that is known"
            )
        return scaling
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata[f"{architecture}.rope.scaling.factor"]}
    original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    return scaling if original is None else {**scaling, "original_max_position_embeddings": original}


def llama3_rope_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """What Llama 3.1 divides each of its `head_dim / 2` RoPE frequencies by: 1 for short waves, `factor` for long
    ones, in between a blend of the two frequencies.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    waves_per_context = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((waves_per_context - low) / (high - low), 0.0, 1.0)
    return 1.0 / (blend + (1.0 - blend) / scaling["factor"])
