"""How much memory can be page-locked here, as far as the system says (Linux)."""

from __future__ import annotations

from pathlib import Path


def pinned_memory_limits() -> dict[str, int | None]:
    """Bytes: `total` and `available` memory, `cgroup` limit, `memlock` limit; None: no limit known.

    `memlock` (`ulimit -l`) does not bind the CUDA driver, which pins through its own module; it is
    shown because other ways to pin obey it.
    """
    memory = _meminfo()
    return {
        "total": memory.get("MemTotal"),
        "available": memory.get("MemAvailable"),
        "cgroup": _cgroup_limit(),
        "memlock": _memlock(),
    }


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *unit in fields if unit}


def _cgroup_limit() -> int | None:
    """The smallest `memory.max` from this process's cgroup up to the root (version 2 or 1)."""
    root, limits = Path("/sys/fs/cgroup"), []
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in own:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            limits.append(_number(place / file))
            if place == base:
                break
    # Version 1 writes "no limit" as a number near 2**63.
    return min((value for value in limits if value is not None and value < 1 << 62), default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # ValueError: "max"
        return None


def _memlock() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
