"""Hooks of ``mkdocs.yml``: files beside ``docs/`` become pages of the site, and its version is the package's.

Pages link to each other as files in the repository, so that they read well there. ``../ARCHITECTURE.md`` and its like
lie outside ``docs/``; here they get a place in the site, and links to and from them follow.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Final

from mike.mkdocs_utils import docs_version_var
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT: Final = Path(__file__).parents[1]
_PLACES: Final = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
}
"""By the path of a file in the repository, its path in the site."""

_LINK: Final = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]*)(?P<anchor>#[^)\s]*)?(?=\))")
_COMMENT: Final = re.compile(r"^<!-- .*?-->\n", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say in the footer which version the pages describe; let readers choose one where mike keeps several."""
    config.copyright = f"ft-transport {version('ft-transport')}"
    if docs_version_var in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie beside ``docs/``."""
    for source, place in _PLACES.items():
        files.append(File.generated(config, place, content=(_ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files into links between pages, and leave out comments: they are for who runs the blocks."""
    del config, files
    place = page.file.src_uri
    written_at = next((source for source, at in _PLACES.items() if at == place), f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        if not link["path"]:
            return link[0]
        target = normpath(str(PurePosixPath(written_at).parent / link["path"]))
        target = _PLACES.get(target, "README.md" if target == "README.md" else target.removeprefix("docs/"))
        found = relpath(target, PurePosixPath(place).parent)
        return found + (link["anchor"] or "")

    return _LINK.sub(moved, _COMMENT.sub("", markdown))
