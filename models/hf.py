"""Opens a Hugging Face model folder: config, safetensors, tokenizer and chat template."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors

from directkv_jax.models import families
from directkv_jax.models.checkpoint import Checkpoint, Tensor, read_json
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.families.common import Family
from directkv_jax.models.kinds import MAPPING, TEXT, token_ids
from directkv_jax.models.tokenizer import Tokenizer

_FLOATS = ("BF16", "F16", "F32", "F64")


def open_folder(path: Path) -> Checkpoint:
    """Opens a folder without reading any weights yet.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is truncated, mislabelled or for another architecture.
    """
    family, config = open_config(path)
    tensors, problems = open_tensors(path)
    tokenizer = _tokenizer(path, config)
    return Checkpoint(
        path, config, tensors, tokenizer, layout=family.layout(tensors), ignored=family.ignored,
        problems=tuple(problems),
    )  # fmt: skip


def open_config(path: Path) -> tuple[Family, ModelConfig]:
    """The family and the configuration of a folder, from its `config.json` alone.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is for another architecture, or for quantized weights.
    """
    values = read_json(path / "config.json")
    if values.get("quantization_config") is not None:
        raise ValueError(
            f"{path} holds quantized weights (`quantization_config`), expected plain bfloat16, "
            "float16 or float32. Take the unquantized checkpoint or a GGUF file."
        )
    try:
        family = families.find(values)
        config = family.config(values)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    return family, config


def open_tensors(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a folder by name, and what is wrong with them.

    Raises:
      FileNotFoundError: there is no safetensors file.
      ValueError: one is truncated or of another format.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    if single.is_file() or not index.is_file():
        if not single.is_file():
            raise FileNotFoundError(_no_weights(path))
        _add_shard(single, None, tensors, problems)
        return tensors, problems
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} should hold `weight_map`, a mapping of tensors to files.")
    for shard in sorted(set(map(str, weight_map.values()))):
        names = [name for name, file in weight_map.items() if file == shard]
        if Path(shard).name != shard:
            problems.append(f"shard: `{shard}` should be a plain file name")
        elif not (path / shard).is_file():
            problems.append(f"shard: `{shard}` is missing, expected {len(names)} tensors in it")
        else:
            _add_shard(path / shard, names, tensors, problems)
    return tensors, problems


def _add_shard(
    file: Path, names: list[str] | None, tensors: dict[str, Tensor], problems: list[str]
) -> None:
    try:
        # The header is checked against the size of the file here, before anything is allocated.
        reader = safetensors.safe_open(str(file), framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} should be a complete safetensors file, but is truncated, damaged or of "
            f"another format ({error}). Copy or download it again."
        ) from error
    held = set(reader.keys())
    for name in held if names is None else names:
        if name not in held:
            continue  # reported as missing, with its shape
        view = reader.get_slice(name)
        if view.get_dtype() not in _FLOATS:
            problems.append(
                f"dtype: `{name}`, expected one of {', '.join(_FLOATS)}, got {view.get_dtype()}"
            )
        tensors[name] = Tensor(tuple(view.get_shape()), functools.partial(reader.get_tensor, name))


def _no_weights(path: Path) -> str:
    found = ", ".join(sorted(p.name for p in path.glob("*.bin"))) or "none"
    return (
        f"{path} should hold `model.safetensors` or `model.safetensors.index.json`, but has "
        f"neither (pickled *.bin files, which are never opened: {found}). "
        "Convert it to safetensors."
    )


def _tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} should hold `tokenizer.json`, but does not. A SentencePiece `tokenizer.model` "
            "alone is not read: save it once with a fast tokenizer."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics of Rust
        raise ValueError(f"{file} could not be read as a tokenizer: {error}") from error
    # Of the training; a prompt is read as it is.
    backend.no_truncation()
    backend.no_padding()
    options = _optional_json(path / "tokenizer_config.json")
    generation = _optional_json(path / "generation_config.json")
    with _named(path / "generation_config.json"):
        eos = token_ids(generation.get("eos_token_id")) or config.eos_token_id
    with _named(path / "tokenizer_config.json"):
        special = _special_tokens(options)
        template = _named_template(options.get("chat_template"))
    if (file := path / "chat_template.jinja").is_file():
        with _named(file):
            template = file.read_text(encoding="utf-8")
    if not eos and (named := backend.token_to_id(special.get("eos_token", ""))) is not None:
        eos = (named,)
    return Tokenizer(backend, config.bos_token_id, eos, template, special)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Errors of what a file holds begin with its name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(options: dict[str, Any]) -> dict[str, str]:
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = options.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            special[name] = TEXT.check(name, text)
    return special


def _named_template(template: Any) -> str | None:
    """A chat template, or of several, `{"name": ..., "template": ...}` each, the default one."""
    if isinstance(template, list):
        named = [MAPPING.check("chat_template", each) for each in template]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return None if template is None else TEXT.check("chat_template", template)
