"""What devices can do at best, by `jax.Device.device_kind`: from their makers' data sheets, dense bf16."""

from typing import NamedTuple


class Peak(NamedTuple):
    bytes_per_second: float
    flops_per_second: float


PEAKS = {
    "TPU v4": Peak(1.228e12, 275e12),
    "TPU v5 lite": Peak(0.819e12, 197e12),
    "TPU v5": Peak(2.765e12, 459e12),
    "TPU v6 lite": Peak(1.640e12, 918e12),
    "TPU7x": Peak(3.690e12, 1153e12),  # one device is one of a chip's two cores
    "Tesla T4": Peak(0.320e12, 65e12),
    "NVIDIA A10G": Peak(0.600e12, 70e12),
    "NVIDIA A100-SXM4-40GB": Peak(1.555e12, 312e12),
    "NVIDIA A100-SXM4-80GB": Peak(2.039e12, 312e12),
    "NVIDIA A100 80GB PCIe": Peak(1.935e12, 312e12),
    "NVIDIA L4": Peak(0.300e12, 121e12),
    "NVIDIA L40S": Peak(0.864e12, 362e12),
    "NVIDIA GeForce RTX 4090": Peak(1.008e12, 165e12),
    "NVIDIA H100 PCIe": Peak(2.000e12, 756e12),
    "NVIDIA H100 80GB HBM3": Peak(3.350e12, 989e12),
    "NVIDIA H200": Peak(4.800e12, 989e12),
    "NVIDIA B200": Peak(8.000e12, 2250e12),
}
