"""The CUDA kernels without JAX: builds and runs cuda/attend_sweep.cu.

    python benchmarks/attend_sweep.py --output benchmarks/results

Attention calls, and one layer of append and attend in a CUDA graph of 32, as a program of kernels
alone would record it. Needs nvcc and a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from directkv_jax.bench import record, table

SOURCES = Path(__file__).parents[1] / "csrc" / "cuda"
KERNELS = [
    "attend",
    "attend_bf16",
    "attend_f16",
    "attend_f32",
    "append",
    "tile_map",
    "device_limits",
]
# placement, B, S, K, G, H, T
CASES = [
    (placement, batch, length, 8, 4, 128, 1)
    for placement in ("device", "host")
    for batch, length in ((1, 16), (1, 1024), (1, 8192), (16, 1024))
]
COLUMNS = {
    "placement": "placement", "B": "B", "S": "S", "us": "us", "GB/s": "gb_per_s",
    "us of append + attend": "layer_us",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", metavar="DIR", help="of the record")
    parser.add_argument("--program", help="attend_sweep, built already (the C++ tests build it)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = options.program or build(f"{folder}/attend_sweep")
        rows = [json.loads(line) for case in CASES for line in measured(program, case)]
    print("\n".join(table.lines(COLUMNS, rows)))
    result = {**record.stamp(), "benchmark": "attend_sweep", "rows": rows}
    print(record.write(result, f"{record.gpu_slug()}-attend-sweep", options.output))


def build(program: str) -> str:
    sweep = Path(__file__).parent / "cuda" / "attend_sweep.cu"
    sources = [str(sweep), *(str(SOURCES / f"{name}.cu") for name in KERNELS)]
    command = ["nvcc", "-O3", "-std=c++17", "-arch=native", "--threads", "0", "-o", program]
    subprocess.run([*command, *sources], check=True)
    return program


def measured(program: str, case: tuple) -> list[str]:
    command = [program, *map(str, case)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    main()
