"""Hooks of mkdocs: links that lead out of this folder become the path in the checkout."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns a page whose links to files outside of docs are their text and path."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)", _as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
