"""The Python in README.md runs as it stands."""

from __future__ import annotations

import jax
import pages
import pytest

BLOCKS = pages.blocks(pages.ROOT / "README.md", "python")


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block):
    names = block.run({})
    assert names["out"].ndim >= 3
    assert bool(jax.numpy.isfinite(names["out"]).all())


def test_there_are_blocks():
    assert len(BLOCKS) == 2
