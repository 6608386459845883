"""The Python in README.md runs as it stands."""

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(code):
    names = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["out"].ndim >= 3
    assert bool(jax.numpy.isfinite(names["out"]).all())


def test_there_are_blocks():
    assert len(BLOCKS) == 2
