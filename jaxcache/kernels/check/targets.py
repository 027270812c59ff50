"""Compiling for devices that are not there: the compilers need only a description of the device.

TPUs: libtpu, from PyPI. NVIDIA GPUs: JAX's CUDA plugin and ptxas, also from PyPI (`make aot-gpu`).
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

TPU_TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
"""Target to topology, the smallest that libtpu knows."""


@dataclass(frozen=True)
class GpuSpec:
    """What XLA's GPU compiler asks about a device (NVIDIA's data sheets)."""

    device_kind: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    """Shared memory that a program may have, in bytes."""
    threads: int = 2048
    """Per multiprocessor."""

    def text(self) -> str:
        """As XLA's `GpuTargetConfigProto`."""
        major, minor = self.capability
        # Instructions of one generation alone: tensor cores from Hopper on are reached through them.
        special = ", feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024, threads_per_warp: 32, threads_per_core_limit: {self.threads},
                shared_memory_per_block: 49152, shared_memory_per_block_optin: {self.shared_bytes},
                shared_memory_per_core: {self.shared_bytes + 1024}, registers_per_core_limit: 65536,
                registers_per_block_limit: 65536, core_count: {self.multiprocessors}, fpus_per_core: 128,
                block_dim_limit_x: 2147483647, block_dim_limit_y: 65535, block_dim_limit_z: 65535,
                memory_bandwidth: 2000000000000, l2_cache_size: 41943040, clock_rate_ghz: 1.7,
                device_memory_size: 42949672960,
                cuda_compute_capability {{ major: {major}, minor: {minor}{special} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9, minor: 10 }}
            runtime_version {{ major: 12, minor: 9 }}
            device_description_str: "{self.device_kind}"
        """


GPU_SPECS = {
    "a100": GpuSpec("NVIDIA A100", (8, 0), 108, 166_912),
    "l4": GpuSpec("NVIDIA L4", (8, 9), 58, 101_376, threads=1536),
    "h100": GpuSpec("NVIDIA H100", (9, 0), 132, 232_448),
    "b200": GpuSpec("NVIDIA B200", (10, 0), 148, 232_448),
}


def can_compile_for(platform: str) -> bool:
    """Whether the compiler for "tpu" or "cuda" is installed."""
    if platform == "tpu":
        return importlib.util.find_spec("libtpu") is not None
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None for version in (12, 13))


@functools.cache
def devices(target: str) -> list[Any]:
    """The devices (`jax.Device`) of the smallest topology of a target."""
    if target in TPU_TOPOLOGIES:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask a cloud for metadata
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a lock file guards a TPU that is not there
        return list(topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[target]).devices)
    config = {"target_config": GPU_SPECS[target].text(), "topology": "1x1x1"}
    return list(topologies.get_topology_desc(platform="cuda", topology_name=target, **config).devices)


def compile_for(target: str, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """`function` compiled for one device of `target`; `args` are pytrees of `jax.ShapeDtypeStruct`."""
    device = devices(target)[0]
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(abstract_mesh(target)):
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        platform = "tpu" if target in TPU_TOPOLOGIES else "cuda"
        return traced.lower(lowering_platforms=(platform,)).compile()


def abstract_mesh(target: str) -> AbstractMesh:
    """Pallas asks the mesh of the trace which device it lowers for. For GPUs no compiler is needed to say it."""
    if target in TPU_TOPOLOGIES:
        device = devices(target)[0]
        kind = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    else:
        kind = AbstractDevice(device_kind=GPU_SPECS[target].device_kind, num_cores=None, platform="gpu")
    return AbstractMesh((), (), axis_types=(), abstract_device=kind)
