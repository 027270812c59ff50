"""Compiling for TPUs that are not there: libtpu needs only a description of the topology."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask a cloud for metadata
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a lock file guards a TPU that is not there

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
"""Target to topology, the smallest that libtpu knows."""


@functools.cache
def devices(target: str) -> list[jax.Device]:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target]).devices)


def compile_for(target: str, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """`function` compiled for one chip of `target`; `args` are pytrees of `jax.ShapeDtypeStruct`."""
    device = devices(target)[0]
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(abstract_mesh(device)):
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def abstract_mesh(device: jax.Device) -> AbstractMesh:
    """Pallas asks the mesh of the trace which TPU it lowers for."""
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    return AbstractMesh((), (), axis_types=(), abstract_device=kind)
