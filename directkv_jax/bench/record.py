"""What every result is stamped with, and how it is written.

    python directkv_jax/bench/record.py      prints the stamp

Imports nothing else of the package: `scripts/gpu_check.py` loads it by its path, before anything is
built.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "directkv-jax",
)


def checkout() -> Path | None:
    """The source tree that this file is in, else the one the current directory is; or None."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "pyproject.toml").is_file() and (root / "directkv_jax" / "bench").is_dir():
            return root
    return None


def results() -> Path:
    """Where records go by default: `benchmarks/results` of the checkout, else here."""
    root = checkout()
    return root / "benchmarks" / "results" if root else Path()


def stamp() -> dict[str, Any]:
    """Date, machine, GPUs, versions and commit, as plain JSON values."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "gpus": gpus(),
        "versions": versions(),
        "commit": commit(),
    }


def write(result: dict[str, Any], name: str, output: str | Path | None = None) -> Path:
    """Writes `{**stamp(), **result}` into the folder `output` as `<date>-<name>.json`.

    A result that is stamped already keeps its stamp: a record that is written again and again while
    it grows stays one file. The file is exchanged whole, so an interruption leaves a valid one.
    """
    record = result if "date" in result else {**stamp(), **result}
    folder = results() if output is None else Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['date'][:10]}-{name}.json"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    unfinished.replace(path)
    return path


def command(program: str) -> str:
    """The command line of this process after `program`, as a person would repeat it.

    Where the record goes is left out: it is a path of one machine, and changes no figure.
    """
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return shlex.join([*program.split(), *kept])


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.M)
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.M)
    return {
        "arch": platform.machine(),
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first core; 0 if the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if size := re.match(r"(\d+)([KM]?)", path.read_text()):
            sizes.append(int(size[1]) << {"": 0, "K": 10, "M": 20}[size[2]])
    return max(sizes)


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of every NVIDIA GPU."""
    fields = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    out = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return [dict(zip(fields, line.split(", "), strict=False)) for line in out.splitlines()]


def visible_gpus() -> list[dict[str, str]]:
    """Those JAX will see, as their driver says: JAX is not started for it."""
    return [] if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") else gpus()


def gpu_slug() -> str:
    """The first GPU's name for a file name: `h200`; `nogpu` without one."""
    names = [gpu["name"] for gpu in gpus()] or ["nogpu"]
    words = names[0].lower().replace("nvidia", "").replace("geforce", "").split()
    return "-".join(re.sub(r"[^a-z0-9]", "", word) for word in words) or "gpu"


def versions() -> dict[str, str | None]:
    """Versions of Python, the packages and the CUDA toolkit."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    toolkit = re.search(r"release ([\d.]+)", _run("nvcc", "--version"))
    found["cuda_toolkit"] = toolkit.group(1) if toolkit else None
    driver = re.search(r"CUDA Version:\s*([\d.]+)", _run("nvidia-smi"))
    found["cuda_driver"] = driver.group(1) if driver else None
    return found


def commit() -> dict[str, Any]:
    """The commit, and whether tracked files differ from it.

    Where the checkout came without its history, DIRECTKV_COMMIT says which commit it is.
    """
    given, root = os.environ.get("DIRECTKV_COMMIT"), checkout()
    head = _run("git", "-C", str(root), "rev-parse", "HEAD").strip() if root else ""
    if not head:
        return {"hash": given, "dirty": None}
    changed = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"hash": head, "dirty": bool(changed.strip())}


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    json.dump(stamp(), sys.stdout, indent=2)
    print()
