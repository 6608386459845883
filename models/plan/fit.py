"""Whether a workload fits a machine, and the largest one that does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from directkv_jax._layout import MAX_LENGTH
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.plan.gpus import Gpu, gpu_of_kind
from directkv_jax.models.plan.memory import Sizes, Workload, sizes_of
from directkv_jax.models.plan.step import (
    HBM_SHARE,
    LINK_SHARE,
    LINK_SHARE_OF_COPY,
    StepTime,
    step_time,
)

LARGEST_BATCH = 2**31 - 1
SMALLEST_PREFILL_BYTES = 16 << 20  # below that a prompt is read too slowly to be worth it
# Of a GPU's memory, what JAX takes unless it is told otherwise.
DEFAULT_MEM_FRACTION = 0.75


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where it is to run. None is what is not known.

    Attributes:
      name: for people.
      device_bytes: of device memory that JAX may take.
      device_total_bytes: of the device, what JAX leaves included.
      host_bytes: of host memory that can be page-locked.
      hbm_bytes_per_s: of a plain read of device memory.
      link_bytes_per_s: of SMs that read host memory.
      validated: whether predicted times were compared with records of such a machine.
      one_memory: there is no GPU, and all of it lies in `host_bytes`.
    """

    name: str
    device_bytes: int | None = None
    device_total_bytes: int | None = None
    host_bytes: int | None = None
    hbm_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    validated: bool = False
    one_memory: bool = False

    @classmethod
    def published(cls, name: str, gpu: Gpu, host_bytes: int | None = None) -> Machine:
        """A GPU by its published figures, at the shares of them that an H200 reached.

        Args:
          name: of the GPU.
          gpu: its figures.
          host_bytes: host memory that can be page-locked; None takes what comes with the GPU.
        """
        return cls(
            name=name,
            device_bytes=int(gpu.memory_bytes * DEFAULT_MEM_FRACTION),
            device_total_bytes=gpu.memory_bytes,
            host_bytes=gpu.host_bytes if host_bytes is None else host_bytes,
            hbm_bytes_per_s=HBM_SHARE * gpu.hbm_bytes_per_s,
            link_bytes_per_s=LINK_SHARE * gpu.link_bytes_per_s,
            validated=gpu.validated,
        )

    @classmethod
    def measured(
        cls, kind: str, device_bytes: int | None, host_bytes: int, copy_bytes_per_s: float
    ) -> Machine:
        """The machine at hand: its link as measured, its device memory as published.

        Args:
          kind: JAX's `device_kind`; of one that is not in `GPUS` times are not predicted.
          device_bytes: that JAX may take.
          host_bytes: host memory that can be page-locked.
          copy_bytes_per_s: of a copy from page-locked memory to the device.
        """
        gpu = gpu_of_kind(kind)
        return cls(
            name=kind,
            device_bytes=device_bytes,
            device_total_bytes=None if gpu is None else gpu.memory_bytes,
            host_bytes=host_bytes,
            hbm_bytes_per_s=None if gpu is None else HBM_SHARE * gpu.hbm_bytes_per_s,
            link_bytes_per_s=LINK_SHARE_OF_COPY * copy_bytes_per_s,
            validated=gpu is not None and gpu.validated,
        )


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes `needed` and `available`; None: not known."""

    needed: int
    available: int | None

    @property
    def fits(self) -> bool | None:
        """Whether it does; None if that is not known."""
        if not self.needed:
            return True
        return None if self.available is None else self.needed <= self.available


@dataclasses.dataclass(frozen=True)
class Plan:
    """A workload on a machine.

    Attributes:
      work: the workload.
      machine: the machine.
      sizes: bytes.
      host: of host memory.
      device: of device memory; None on a machine without a GPU.
      step: the time of a step at the full context; None if the bandwidths are not known.
    """

    work: Workload
    machine: Machine
    sizes: Sizes
    host: Memory
    device: Memory | None
    step: StepTime | None

    @property
    def fits(self) -> bool | None:
        """Whether all of it does; None if that is not known."""
        answers = {self.host.fits, True if self.device is None else self.device.fits}
        return False if False in answers else None if None in answers else True


def make_plan(config: ModelConfig, work: Workload, machine: Machine) -> Plan:
    """The plan of a workload.

    Raises:
      ValueError: as `sizes_of`.
    """
    sizes = sizes_of(config, work)
    hbm, link = machine.hbm_bytes_per_s, machine.link_bytes_per_s
    known = hbm is not None and link is not None
    in_host = sizes.kv_host_bytes + (sizes.device_bytes if machine.one_memory else 0)
    return Plan(
        work=work,
        machine=machine,
        sizes=sizes,
        host=Memory(in_host, machine.host_bytes),
        device=None if machine.one_memory else Memory(sizes.device_bytes, machine.device_bytes),
        step=step_time(sizes, len(config.layers), hbm, link) if known else None,
    )


def largest_context(config: ModelConfig, work: Workload, machine: Machine) -> int | None:
    """Tokens, in whole pages, that fit where one page more does not; 0 if no page fits.

    None if it is not known what fits. Does not ask how long a context the model was made for.
    """
    size = work.page_size
    pages = _largest(lambda n: _fits(config, work, machine, context=n * size), MAX_LENGTH // size)
    return None if pages is None else pages * size


def largest_batch(config: ModelConfig, work: Workload, machine: Machine) -> int | None:
    """Rows that fit where one more does not; 0 if none fits, None if that is not known."""
    return _largest(lambda n: _fits(config, work, machine, batch=n), LARGEST_BATCH)


def smaller_prefill_bytes(config: ModelConfig, work: Workload, machine: Machine) -> int | None:
    """The largest of the halves of `prefill_bytes` that makes it fit; None if it does, or none."""
    budget = work.prefill_bytes
    if _fits(config, work, machine) is not False:
        return None
    while (budget := budget // 2) >= SMALLEST_PREFILL_BYTES:
        if _fits(config, work, machine, prefill_bytes=budget):
            return budget
    return None


def _fits(config: ModelConfig, work: Workload, machine: Machine, **changes) -> bool | None:
    return make_plan(config, dataclasses.replace(work, **changes), machine).fits


def _largest(fits: Callable[[int], bool | None], limit: int) -> int | None:
    if (answer := fits(1)) is None:
        return None
    low, high = 0, 1
    while answer:
        low, high = high, min(2 * high, limit + 1)
        answer = high <= limit and fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
