"""Whether a model and a context fit a machine, and how long a decode step takes: arithmetic alone.

Nothing here allocates, touches a device or reads weights.
"""

from directkv_jax.models.plan.fit import (
    Machine,
    Memory,
    Plan,
    largest_batch,
    largest_context,
    make_plan,
    smaller_prefill_bytes,
)
from directkv_jax.models.plan.gpus import GPUS, Gpu, find_gpu, gpu_of_kind
from directkv_jax.models.plan.memory import Sizes, Workload, count_parameters, sizes_of
from directkv_jax.models.plan.shapes import SHAPES, shape
from directkv_jax.models.plan.step import StepTime

__all__ = [
    "GPUS",
    "SHAPES",
    "Gpu",
    "Machine",
    "Memory",
    "Plan",
    "Sizes",
    "StepTime",
    "Workload",
    "count_parameters",
    "find_gpu",
    "gpu_of_kind",
    "largest_batch",
    "largest_context",
    "make_plan",
    "shape",
    "sizes_of",
    "smaller_prefill_bytes",
]
