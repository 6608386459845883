"""Decode steps of Hugging Face transformers with its offloaded cache, shapes as in `bench decode`.

What is timed is a step of `generate` as users call it: greedy, from the logits of one token to
those of the next, the device synchronised at both. The weights are random, the cache is that of a
random prompt, which the model reads first; that prefill is not part of any figure but its own.

    python benchmarks/hf_offloaded.py --batch 4 --length 32768 --output benchmarks/results

The rows have the keys of `directkv bench decode`; "placement" is "hf-offloaded" for
`cache_implementation="offloaded"` and "hf-dynamic" for the default cache, in device memory. Needs
torch with CUDA and transformers 5 beside directkv_jax.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

from directkv_jax.bench import record
from directkv_jax.bench.decode_cases import SHAPES, Case

PLACEMENTS = ("hf-offloaded", "hf-dynamic")
WARMUP = 6  # steps before those that count


def main() -> int:
    """Measures row by row; the exit status is 1 if no row could be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[4])
    parser.add_argument("--length", type=int, nargs="+", default=[32768])
    parser.add_argument("--placement", choices=PLACEMENTS, nargs="+", default=list(PLACEMENTS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--hbm-limit", type=float, metavar="GB", help="in 10^9 bytes")
    parser.add_argument("--output", metavar="DIR", help="write the record there")
    parser.add_argument("--name", help="of the record (default: the GPU and `hf-offloaded`)")
    options = parser.parse_args()
    cases = [
        Case(
            options.shape, placement, batch, length, options.layers, options.steps,
            warmup=WARMUP, hbm_limit_gb=options.hbm_limit,
        )
        for batch in options.batch
        for length in options.length
        for placement in options.placement
    ]  # fmt: skip
    stamp = record.stamp()
    stamp["versions"].update({name: version(name) for name in ("torch", "transformers")})
    result: dict[str, Any] = {
        **stamp,
        "benchmark": "hf_offloaded",
        "command": record.command("python benchmarks/hf_offloaded.py"),
        "peaks": {},
        "rows": [],
    }
    name = options.name or f"{record.gpu_slug()}-hf-offloaded"
    for case in cases:
        row = measure(case)
        result["rows"].append(row)
        told = row["error"] or f"{row['ms_per_step']:.1f} ms/step"
        print(f"{case.placement} B={case.batch} S={case.length}: {told}", flush=True)
        if options.output:
            record.write(result, name, options.output)
    return 0 if any(row["error"] is None for row in result["rows"]) else 1


def measure(case: Case) -> dict[str, Any]:
    """The row of `case`; with "error" if it does not run."""
    try:
        return _measure(case)
    except Exception as error:  # torch names out of memory in several ways; the run goes on
        text = " ".join(str(error).split())
        return {**case.row(), "error": f"{type(error).__name__}: {text}"[:600]}


def _measure(case: Case) -> dict[str, Any]:
    import torch
    from transformers import LogitsProcessorList

    gc.collect()  # what the row before left
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if case.hbm_limit_gb and cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case.hbm_limit_gb * 1e9 / total)
    model = _model(case.shape, case.layers)
    shape = (case.batch, case.length)
    prompt = torch.randint(0, case.config["vocab_size"], shape, device=model.device)
    clock = _Clock()
    count = 1 + case.warmup + case.steps
    options = {"cache_implementation": "offloaded"} if case.placement == "hf-offloaded" else {}
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=count, min_new_tokens=count,
            logits_processor=LogitsProcessorList([clock]), **options,
        )  # fmt: skip
    times = clock.times
    if len(times) != count:
        raise RuntimeError(f"{count} tokens should have been generated, but {len(times)} were")
    steps = [after - before for before, after in itertools.pairwise(times)]
    ms = [1e3 * seconds for seconds in steps[case.warmup :]]
    median = statistics.median(ms)
    offloaded = case.placement == "hf-offloaded"
    return {
        **case.row(),
        "implementation": f"transformers {version('transformers')}, {case.placement[3:]} cache",
        "ms_per_step": median,
        "ms_all": [round(value, 4) for value in ms],
        "tokens_per_s": case.batch / median * 1e3,
        "prefill_s": times[0] - started,
        "hbm_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "hbm_peak_bytes_prefill": clock.prefill_peak,
        "host_bytes": None if offloaded else 0,
        "finite_logits": all(bool(finite) for finite in clock.finite),
        "link_gb_per_s": case.kv_bytes / (median * 1e6) if offloaded and cuda else None,
        "notes": ["the peaks of the link and of HBM are measured by `directkv bench` only"],
    }


class _Clock:
    """A logits processor that changes nothing: it notes when each token's logits are there.

    Attributes:
      times: seconds, the first when the prompt has been read.
      finite: whether the logits of each were; on the device.
      prefill_peak: bytes of device memory at the worst moment until the first.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.finite: list[Any] = []
        self.prefill_peak: int | None = None

    def __call__(self, input_ids, scores):
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if not self.times:
                self.prefill_peak = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
        self.finite.append(scores.isfinite().all())
        self.times.append(time.perf_counter())
        return scores


@functools.lru_cache(maxsize=1)
def _model(shape: str, layers: int | None):
    """The model with random bfloat16 weights, made where it runs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = Case(shape, "hf-dynamic", 1, 1, layers).config
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**config, max_position_embeddings=1 << 20)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


if __name__ == "__main__":
    sys.exit(main())
