"""What MkDocs is given beside `docs/`: the package as it is installed, and the records it cites."""

from __future__ import annotations

import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# `models/` is a part of the package only once it is installed, and sources are read, not imported.
PACKAGE = ROOT / "build" / "docs-package" / "directkv_jax"
RECORDS = "benchmarks/results"


@event_priority(100)  # before mkdocstrings looks where sources are
def on_config(config: MkDocsConfig) -> None:
    """Lays out the sources of the package as an installation has them."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    only_python = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "directkv_jax", PACKAGE, ignore=only_python)
    shutil.copytree(ROOT / "models", PACKAGE / "models", ignore=only_python)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the records, so that the site holds what its tables are made from."""
    for path in sorted((ROOT / RECORDS).glob("*.json")):
        files.append(File.generated(config, f"{RECORDS}/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, **_) -> str:
    """In the repository the records lie beside `docs/`, in the site below it."""
    return markdown.replace(f"](../{RECORDS}/", f"]({RECORDS}/")
