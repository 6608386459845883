"""The Flax examples run, agree with Flax and leave the cache in place."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["flax_nnx", "flax_linen", "scan_layers"])
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "stayed in place: True" in printed
    assert "stayed in place: False" not in printed
    for error in re.findall(r"difference from Flax (\S+)", printed):
        assert float(error) < 1e-5
