"""How fast CTAs fetch KV tiles, for each way to lay them out: builds and runs cuda/tile_fetch.cu.

    python benchmarks/tile_fetch.py --output benchmarks/results

Needs nvcc and a GPU of compute capability 9.0 or later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from directkv_jax.bench import record, table

SOURCE = Path(__file__).parent / "cuda" / "tile_fetch.cu"
COLUMNS = {"way": "way", "memory": "memory", "CTAs": "ctas", "stages": "stages", "GB/s": "gb_per_s"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", metavar="DIR", help="of the record")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/tile_fetch"
        compiler = ["nvcc", "-O3", "-std=c++17", "-arch=native", "-o", program, str(SOURCE)]
        subprocess.run(compiler, check=True)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in lines.splitlines()]
    for memory in ("host", "hbm"):
        if len({row["sum"] for row in rows if row["memory"] == memory}) != 1:
            raise RuntimeError(f"The ways to read {memory} memory do not read the same data.")
    print("\n".join(table.lines(COLUMNS, rows)))
    result = {**record.stamp(), "benchmark": "tile_fetch", "rows": rows}
    print(record.write(result, f"{record.gpu_slug()}-tile-fetch", options.output))


if __name__ == "__main__":
    main()
