"""Builds and tests on a CUDA machine, stage by stage, and records what passed.

A failed stage does not stop the next. The record is written after every stage, and a later run on
the same day and commit replaces only the stages it ran: long checks can be split over several runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "gpu-check"
CPP = WORK / "cpp"
FIGURES = WORK / "figures.json"


def _load(path: Path):
    """A module by its path: nothing of the package is installed yet."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = _load(ROOT / "directkv_jax" / "bench" / "record.py")
Counts = dict[str, int]


def main() -> int:
    """Runs the chosen stages; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", metavar="DIR", help="of the record; default benchmarks/results")
    parser.add_argument("--workers", type=int, default=4, help="processes of the Python tests")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: {' '.join(STAGES)}")
    options = parser.parse_args()
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; there are {list(STAGES)}")
    os.environ.setdefault("DIRECTKV_CHECK_WORKERS", str(options.workers))
    WORK.mkdir(parents=True, exist_ok=True)
    check = Record(options.output)
    for name in options.stages or STAGES:
        check.run(name, STAGES[name])
    check.show()
    return 1 if check.total("failed") else 0


class Record:
    """The stages so far, and the file they are kept in."""

    def __init__(self, output: str | None):
        self.output, self.stamp, self.ran = output, record.stamp(), set[str]()
        self.name = f"{record.gpu_slug()}-check"
        path = Path(output or record.results()) / f"{self.stamp['date'][:10]}-{self.name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        same = known.get("commit") == self.stamp["commit"]
        self.stages = known.get("stages", {}) if same else {}
        self.figures = known.get("figures", {}) if same else {}

    def run(self, name: str, stage: Callable[[Path], Counts]) -> None:
        """One stage; what it raises is a failure of that stage alone."""
        log, start = WORK / f"{name}.log", time.monotonic()
        print(f"=== {name}", flush=True)
        log.unlink(missing_ok=True)
        FIGURES.unlink(missing_ok=True)
        try:
            counts = stage(log)
        except Exception as error:  # recorded, and the next stage runs
            print(f"{type(error).__name__}: {error}")
            counts = {"passed": 0, "failed": 1, "skipped": 0}
        self.stages[name] = {**counts, "seconds": round(time.monotonic() - start, 1)}
        self.ran.add(name)
        if FIGURES.exists():
            self.figures |= json.loads(FIGURES.read_text())
        self.write()

    def total(self, what: str) -> int:
        """Sum over all stages on record."""
        return sum(stage[what] for stage in self.stages.values())

    def write(self) -> Path:
        """Writes the record as it stands."""
        counts = {what: self.total(what) for what in ("passed", "failed", "skipped")}
        result = {**self.stamp, "check": "gpu", **counts, "stages": self.stages}
        return record.write({**result, "figures": self.figures}, self.name, self.output)

    def show(self) -> None:
        """A short table."""
        print(f"\n{'stage':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
        for name, stage in self.stages.items():
            row = f"{stage['passed']:>8}{stage['failed']:>8}{stage['skipped']:>9}"
            earlier = "" if name in self.ran else "  (an earlier run)"
            print(f"{name:<12}{row}{stage['seconds']:>9}{earlier}")
        print(f"{self.write()}: {self.total('passed')} passed, {self.total('failed')} failed")


def build(log: Path) -> Counts:
    """pip install of this tree, for the GPU at hand and the jaxlib at hand."""
    defines = {**_cmake_defines(), "DIRECTKV_CUDA": "ON"}
    options = [word for k, v in defines.items() for word in ("-C", f"cmake.define.{k}={v}")]
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    failed = _run([*pip, *options, "."], log)
    return {"passed": int(not failed), "failed": int(failed), "skipped": 0}


def cpp(log: Path) -> Counts:
    """Builds the C++ tests, CPU and CUDA, and runs them plainly."""
    pybind11 = _output(sys.executable, "-m", "pybind11", "--cmakedir")
    defines = {
        **_cmake_defines(), "DIRECTKV_CUDA": "ON", "DIRECTKV_BUILD_TESTS": "ON",
        "Python_EXECUTABLE": sys.executable, "pybind11_DIR": pybind11,
    }  # fmt: skip
    options = [f"-D{name}={value}" for name, value in defines.items()]
    configure = ["cmake", "-S", str(ROOT), "-B", str(CPP), *options]
    spread = ["--parallel", str(min(16, os.cpu_count() or 1))]
    make = ["cmake", "--build", str(CPP), *spread]
    if _run(configure, log) or _run(make, log):
        return {"passed": 0, "failed": 1, "skipped": 0}
    report = WORK / "cpp.xml"
    report.unlink(missing_ok=True)
    test = ["ctest", "--test-dir", str(CPP), "--output-on-failure", "--output-junit", str(report)]
    test += spread
    counts = _counted(report, _run(test, log))
    return _sum(counts, _cpp_counts(*_programs("directkv_cuda_tests"), log=log))


def sanitizer(tool: str) -> Callable[[Path], Counts]:
    """The C++ tests that need the GPU, in their small mode, under a tool of compute-sanitizer."""

    def stage(log: Path) -> Counts:
        found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        check = [found, "--tool", tool, "--error-exitcode", "9"]
        kernels = _cpp_counts(*check, *_programs("directkv_cuda_tests"), "--quick", log=log)
        # The pool's tests provoke refusals of the driver, which are no errors of ours.
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        pool = _cpp_counts(*check, *quiet, *_programs("directkv_host_pool_tests"), log=log)
        return _sum(kernels, pool)

    return stage


def _programs(name: str) -> list[str]:
    found = [str(path) for path in CPP.rglob(name) if path.is_file() and os.access(path, os.X_OK)]
    if not found:
        raise FileNotFoundError(f"no {name} under {CPP}; run the stage cpp first")
    return found[:1]


def _cpp_counts(*command: str, log: Path) -> Counts:
    """Runs a C++ test program, which prints `ok NAME` or `FAILED NAME` for each test."""
    begin = log.stat().st_size if log.exists() else 0
    failed = _run(list(command), log)
    results = re.findall(r"^(ok|FAILED|skipped) +\w+", log.read_text()[begin:], re.M)
    counts = {"passed": results.count("ok"), "failed": results.count("FAILED")}
    if failed and not counts["failed"]:
        counts["failed"] = 1
    return {**counts, "skipped": results.count("skipped")}


def _sum(*counts: Counts) -> Counts:
    return {key: sum(one[key] for one in counts) for key in ("passed", "failed", "skipped")}


def pytest(*arguments: str, parallel: bool = False) -> Callable[[Path], Counts]:
    """A pytest run of the installed package, on the GPU."""

    def stage(log: Path) -> Counts:
        report = WORK / f"{log.stem}.xml"
        report.unlink(missing_ok=True)
        env = {"DIRECTKV_GPU_FIGURES": str(FIGURES), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        workers = os.environ["DIRECTKV_CHECK_WORKERS"]
        spread = ["-n", workers] if parallel and _has("xdist") and workers != "0" else []
        # -P: the installed package is tested, not the folder of its sources.
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:benchmark"]
        command += [f"--junitxml={report}"]
        return _counted(report, _run([*command, *spread, *arguments], log, env))

    return stage


STAGES: dict[str, Callable[[Path], Counts]] = {
    "build": build,
    "cpp": cpp,
    "memcheck": sanitizer("memcheck"),
    "synccheck": sanitizer("synccheck"),
    "gpu": pytest("tests/gpu", parallel=True),
    "model": pytest("tests/models/test_real_model.py", "-k", "cuda"),
    "parity": pytest("tests/models/test_parity.py", parallel=True),
    "flax": pytest("tests/flax", parallel=True),
    "contract": pytest("tests/core", "tests/property", "-k", "cuda or fused", parallel=True),
}


def _cmake_defines() -> dict[str, str]:
    capability = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    architecture = capability.splitlines()[0].replace(".", "")
    return {
        "DIRECTKV_ALLOW_NEWER_FFI": "ON",
        "CMAKE_CUDA_ARCHITECTURES": f"{architecture}-real",
        "CMAKE_BUILD_TYPE": "Release",
    }


def _counted(report: Path, failed: bool) -> Counts:
    """What a JUnit report counts; a run that failed or passed nothing has one failure at least."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    if report.exists():
        root = ET.parse(report).getroot()
        for suite in root.iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0)) + int(suite.get("disabled", 0))
            counts["failed"] += bad
            counts["skipped"] += skipped
            counts["passed"] += int(suite.get("tests", 0)) - bad - skipped
    if not counts["failed"] and (failed or not counts["passed"]):
        counts["failed"] += 1
    return counts


def _run(command: list[str], log: Path, env: dict[str, str] | None = None) -> bool:
    """Runs, shows and logs; returns whether it failed."""
    print("$", " ".join(command), flush=True)
    with log.open("a") as out, subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if not re.search(r"^\[ *\d+%\]|^\[\d+/\d+\]", line):  # progress of a build
                print(line, end="", flush=True)
    return process.returncode != 0


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    sys.exit(main())
