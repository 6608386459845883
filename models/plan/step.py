"""How long a decode step takes: the time of its bytes, one after the other.

The kernels read the link only while they attend, so that its time and that of the weights add up.
The constants are of one H200 over PCIe 5, in 16 bits; for other GPUs they are assumptions. Records,
in benchmarks/results/: 2026-11-30-h200-decode-reach, -decode-whole-hbm, -decode-context and
-decode-512k.json. Over all their rows the error is at most 4% with the cache in host memory and 9%
with it in device memory, where steps of batch 1 take longer than predicted, of batch 4 less long.
"""

from __future__ import annotations

import dataclasses

from directkv_jax.models.plan.memory import Sizes

# A plain read, of the published bandwidth: 4644 of 4800 GB/s ("hbm_read" of the records).
HBM_SHARE = 0.967
# Reads of host memory by the SMs, of the link's published 63.0 GB/s: 51.4 ("zero_copy").
LINK_SHARE = 0.816
# The same, of a copy by the copy engine: 51.4 of 55.5 GB/s ("copy_engine_gb_per_s").
LINK_SHARE_OF_COPY = 0.926
# Attention over a cache in device memory, of a plain read: the best case of
# 2026-11-30-h200-attention-device.json, whose others reach 0.86 and 0.92.
KV_SHARE = 0.96
# Weights, of a plain read, and the rest of a layer. All records are of one model (15.0 GB in 32
# layers), which fixes the sum of both, 6.4 ms. How it divides is from the 1B model in the log of
# docs/performance.md (1.89 ms, predicted 1.80), of which no record was kept: models of other sizes
# are predicted less surely.
WEIGHT_SHARE = 0.66
LAYER_S = 47e-6


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step, in parts that follow each other.

    Attributes:
      link_s: keys and values over the link.
      weights_s: weights from device memory.
      kv_s: keys and values from device memory.
      layers_s: what layers take besides.
    """

    link_s: float
    weights_s: float
    kv_s: float
    layers_s: float

    @property
    def total_s(self) -> float:
        """The whole step: one token of each row."""
        return self.link_s + self.weights_s + self.kv_s + self.layers_s

    @property
    def bound(self) -> str:
        """Where most of the time goes: "link", "HBM" or "launches"."""
        parts = {
            "link": self.link_s,
            "HBM": self.weights_s + self.kv_s,
            "launches": self.layers_s,
        }
        return max(parts, key=parts.__getitem__)


def step_time(sizes: Sizes, layers: int, hbm: float, link: float) -> StepTime:
    """The time of a step at the full context.

    Args:
      sizes: what it reads.
      layers: L.
      hbm: bytes per second of a plain read of device memory.
      link: bytes per second at which SMs read host memory.
    """
    return StepTime(
        link_s=sizes.read_host_bytes / link,
        weights_s=sizes.read_weight_bytes / (WEIGHT_SHARE * hbm),
        kv_s=sizes.read_device_bytes / (KV_SHARE * hbm),
        layers_s=layers * LAYER_S,
    )
