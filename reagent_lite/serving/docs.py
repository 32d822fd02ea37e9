"""The page /docs: the OpenAPI document in HTML, without scripts and files of other servers."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def docs_page(document: dict[str, Any]) -> str:
    """Returns the page of an OpenAPI document."""
    template = _ENVIRONMENT.get_template("docs.html.j2")
    schemas = {name: json.dumps(schema, indent=2) for name, schema in document["components"]["schemas"].items()}
    return template.render(title=document["info"]["title"], paths=document["paths"], schemas=schemas)
