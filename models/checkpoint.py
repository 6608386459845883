"""What a weight file offers, whatever its format, and how it is poured into a model."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from directkv_jax import QKVProjection
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.names import LLAMA, Names, sources
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer

_LISTED = 20  # problems of one kind an error lists before it only counts them


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its shape is known at once, its values are read on demand."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
      path: for messages.
      config: shapes of the model the weights belong to.
      tensors: by the name in the file, [out, in].
      tokenizer: of the same checkpoint.
      layout: the names that the file uses.
      ignored: beginnings of the names of tensors that belong to no text model.
      problems: what was already found wrong with the keys while opening.
    """

    path: Path
    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer
    layout: Names = LLAMA
    ignored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def build(checkpoint: Checkpoint, dtype, *, progress: bool = True) -> Transformer:
    """A model filled from a checkpoint. Every parameter is allocated once, in its final dtype.

    Raises:
      ValueError: keys or shapes do not fit the model; all of them in one message.
    """
    abstract = nnx.eval_shape(lambda: Transformer(checkpoint.config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    wanted = [_Parameter(checkpoint, path, variable) for path, variable in nnx.to_flat_state(state)]
    _check(checkpoint, wanted)
    filled = []
    with _bar(checkpoint, wanted, progress) as bar:
        for parameter in wanted:
            value = _place(
                [jax.device_put(raw) for raw in _read(checkpoint, parameter)],
                parameter.kind,
                parameter.shape,
                parameter.dtype,
            )
            filled.append((parameter.path, parameter.variable.replace(value)))
            bar.update(value.nbytes)
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


class _Parameter:
    """A parameter of the model, and the tensors of a file that it is made of.

    Attributes:
      path: in the model.
      variable: the abstract `nnx.Param`.
      sources: what it is made of.
      kind: "plain"; "turned", [out, in] in the file; "packed", queries, keys and values;
        "stacked", one for each expert, or one [E, out, in] for all.
    """

    def __init__(self, checkpoint: Checkpoint, path: tuple, variable):
        self.path, self.variable = path, variable
        value = variable.get_value()
        self.shape, self.dtype = tuple(value.shape), value.dtype
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.sources = sources(checkpoint.layout, checkpoint.config, path, self.shape)
        if "qkv_proj" in path and path[-1] in ("kernel", "bias"):
            self.kind = "packed"
        elif len(self.shape) == 3:
            self.kind = "stacked"
        else:
            self.kind = "turned" if path[-1] == "kernel" else "plain"


def _read(checkpoint: Checkpoint, parameter: _Parameter) -> Iterator[np.ndarray]:
    for source in parameter.sources:
        whole = checkpoint.tensors[source.name].read()
        yield whole if source.rows is None else whole[slice(*source.rows)]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _place(raw: list[jax.Array], kind: str, shape: tuple[int, ...], dtype) -> jax.Array:
    # Flax kernels are [in, out]. Transposing on the device is cheaper than in NumPy.
    keep = kind == "plain"
    raw = [(x if keep or x.ndim == 1 else x.mT).astype(dtype) for x in raw]
    if kind == "packed":
        # A bias is packed as the kernel of a single input.
        heads = [array.reshape(-1, array.shape[-1] // shape[-1], shape[-1]) for array in raw]
        return QKVProjection.pack(*heads).kernel.reshape(shape)
    return jnp.stack(raw).reshape(shape) if kind == "stacked" else raw[0]


def _check(checkpoint: Checkpoint, wanted: list[_Parameter]) -> None:
    tied = checkpoint.config.tie_word_embeddings
    shapes = {source.name: source.shape for each in wanted for source in each.sources}
    missing, mis_shaped = [], []
    for name, shape in shapes.items():
        if name not in checkpoint.tensors:
            missing.append(f"missing: `{name}`, expected shape {shape}")
        elif (got := checkpoint.tensors[name].shape) != shape:
            mis_shaped.append(f"mis-shaped: `{name}`, expected {shape}, got {got}")
    head = f"{checkpoint.layout.head}.weight"
    if tied and not (missing or mis_shaped) and _contradicts(checkpoint, head):
        mis_shaped.append(
            f"contradictory: `{head}` differs from the embedding, but `tie_word_embeddings` is "
            "true. Set it to false to use both"
        )
    unexpected = [
        f"unexpected: `{name}`, got shape {tensor.shape}"
        for name, tensor in checkpoint.tensors.items()
        if name not in shapes
        and not name.startswith(checkpoint.ignored)
        and not name.endswith("rotary_emb.inv_freq")  # recomputed; old checkpoints store it
        and not (tied and name == head)  # a copy of the embedding
    ]
    groups = (list(checkpoint.problems), missing, mis_shaped, unexpected)
    if count := sum(map(len, groups)):
        lines = [line for group in groups for line in _shortened(group)]
        raise ValueError(
            f"the weights in {checkpoint.path} do not fit its configuration ({count} problems). "
            "Check that the files belong together and are complete:\n  " + "\n  ".join(lines)
        )


def _contradicts(checkpoint: Checkpoint, head: str) -> bool:
    """Whether a file whose configuration says so has no copy of the embedding as its output."""
    if head not in checkpoint.tensors:
        return False
    ours, theirs = (checkpoint.tensors[name] for name in (checkpoint.layout.embedding, head))
    if ours.shape != theirs.shape:
        return True
    one, other = ours.read(), theirs.read()
    coarse = min((one.dtype, other.dtype), key=lambda dtype: dtype.itemsize)
    return not np.array_equal(one.astype(coarse), other.astype(coarse), equal_nan=True)


def _shortened(lines: list[str]) -> Iterator[str]:
    yield from lines[:_LISTED]
    if len(lines) > _LISTED:
        yield f"{lines[0].split(':')[0]}: and {len(lines) - _LISTED} more"


def _bar(checkpoint: Checkpoint, wanted: list[_Parameter], progress: bool):
    from tqdm import tqdm

    return tqdm(
        total=sum(parameter.nbytes for parameter in wanted),
        desc=f"loading {checkpoint.path.name}",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None if progress else True,  # None: shown where stderr is a terminal
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} should hold `{path.name}`, but does not.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} should be JSON, but could not be parsed: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, but got {type(value).__name__}.")
    return value
