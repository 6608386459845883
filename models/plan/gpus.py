"""GPUs by name, with the figures their makers publish."""

from __future__ import annotations

import dataclasses

GB = 10**9
PCIE4 = 31.5 * GB  # x16, one direction
PCIE5 = 63.0 * GB


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU and its link, as published; bandwidths in bytes per second.

    Attributes:
      memory_bytes: of the device.
      hbm_bytes_per_s: of the device's memory.
      link_bytes_per_s: from host to device, one direction.
      link: what the link is.
      kind: JAX's `device_kind` of it.
      host_bytes: of the CPU memory that comes with it, or None.
      validated: whether times predicted for it were compared with records of this project.
    """

    memory_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    link: str
    kind: str
    host_bytes: int | None = None
    validated: bool = False


def _gpu(memory: float, hbm: float, link: float, name: str, kind: str, **more) -> Gpu:
    return Gpu(int(memory * GB), hbm * GB, link, name, f"NVIDIA {kind}", **more)


GPUS: dict[str, Gpu] = {
    "h200": _gpu(141, 4800, PCIE5, "PCIe 5 x16", "H200", validated=True),
    "h100": _gpu(80, 3350, PCIE5, "PCIe 5 x16", "H100 80GB HBM3"),
    "h100-pcie": _gpu(80, 2000, PCIE5, "PCIe 5 x16", "H100 PCIe"),
    "gh200": _gpu(96, 4000, 450 * GB, "NVLink-C2C", "GH200 480GB", host_bytes=480 * GB),
    # Two GPUs share a Grace CPU, its 480 GB and its 900 GB/s of both directions: half for each.
    "gb200": _gpu(186, 8000, 225 * GB, "NVLink-C2C", "GB200", host_bytes=240 * GB),
    "a100-80gb": _gpu(80, 2039, PCIE4, "PCIe 4 x16", "A100-SXM4-80GB"),
    "l40s": _gpu(48, 864, PCIE4, "PCIe 4 x16", "L40S"),
    "rtx-4090": _gpu(24, 1008, PCIE4, "PCIe 4 x16", "GeForce RTX 4090"),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of a name.

    Raises:
      ValueError: there is none; lists those there are.
    """
    if name not in GPUS:
        raise ValueError(f"`--gpu` should be one of {', '.join(GPUS)}, but got {name!r}.")
    return GPUS[name]


def gpu_of_kind(kind: str) -> Gpu | None:
    """The GPU of JAX's `device_kind`, if it is known."""
    return next((gpu for gpu in GPUS.values() if gpu.kind == kind), None)
