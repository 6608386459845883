"""The Python of docs/checkpoints.md runs, with a tiny random model under the name it gives."""

from __future__ import annotations

import pages


def test_page_runs(folder, tmp_path, monkeypatch):
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    pages.run(pages.ROOT / "docs" / "checkpoints.md")
