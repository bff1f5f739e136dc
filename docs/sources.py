"""A hook of mkdocs: it adds files outside of docs/ that pages link to, below `sources/` of the site.

So one text has valid links in the repository and in the site, and `--strict` finds dead ones.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(\.\./([\w./-]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked = {path for page in files.documentation_pages() for path in LINK.findall(page.content_string)}
    for path in sorted(linked):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"sources/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    return LINK.sub(r"](sources/\1", markdown)
