"""The reference of all keys as a page: python -m reagent_lite.config.reference > docs/reference.md."""

import json
from typing import Any, Final

from reagent_lite.config.compare_config import CompareConfig
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.config.loader import former_names
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.rollout_config import RolloutConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.section import Section, type_in_words
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.config.workflow import DqnConfig

_WORKFLOWS: Final[dict[str, type[Section]]] = {
    "workflows.dqn, workflows.parametric_dqn": DqnConfig,
    "workflows.simulate": SimulateConfig,
    "workflows.evaluate": EvaluateConfig,
    "workflows.compare": CompareConfig,
    "workflows.score": ScoreConfig,
    "workflows.inspect": InspectConfig,
    "workflows.timeline": TimelineConfig,
    "workflows.normalize": NormalizeConfig,
    "workflows.shard": ShardConfig,
    "workflows.convert": ConvertConfig,
    "workflows.serve": ServeConfig,
    "workflows.rollout": RolloutConfig,
}
_HEAD: Final = """\
# All keys

Written by `python -m reagent_lite.config.reference > docs/reference.md` from the classes that check configs. Set a
key of a section by `--set section.key=value`. An empty default is empty text; such a key is required unless its meaning
says what happens without it. [Your own data](data.md) explains data and stages.
"""


def reference() -> str:
    """Returns the page in Markdown: the keys of each workflow, then those of its sections; each section once."""
    lines = [_HEAD]
    shown = dict[str, str]()
    for title, model in _WORKFLOWS.items():
        schema = model.model_json_schema()
        former = former_names(model)
        lines.append(f"## {title}\n")
        sections = [("", schema)]
        for path, section in sections:  # grows in the loop
            if path:
                lines.append(f"### {path} of {_name(title)}\n\n{_line(section['description'])}\n")
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
            for key, field in section["properties"].items():
                kind = _section_of(field)
                below = f"{path}{'.' if path else ''}{key}"
                if below in former:
                    field = {**field, "description": f"{field['description']} Also accepted: `{former[below]}`."}
                if kind and kind not in shown:
                    shown[kind] = f"{below} of {_name(title)}"
                    sections.append((below, schema["$defs"][kind]))
                lines.append(_row(key, field, shown.get(kind, "")))
            lines.append("")
    return "\n".join(lines)


def _name(title: str) -> str:
    return title.split(",")[0].removeprefix("workflows.")


def _section_of(field: dict[str, Any]) -> str:
    of_names = field.get("additionalProperties")  # of a section for each name
    options = (field, *field.get("anyOf", ()), *([of_names] if isinstance(of_names, dict) else []))
    kinds = (option["$ref"].rpartition("/")[2] for option in options if "$ref" in option)
    return next(kinds, "")


def _row(key: str, field: dict[str, Any], section: str) -> str:
    if section:
        anchor = section.replace(" ", "-").replace(".", "")
        default = "none" if "anyOf" in field else ""
        return f"| `{key}` | [section](#{anchor}) | {default} | {_line(field.get('description', ''))} |"
    default = f"`{json.dumps(field['default'])}`" if field.get("default", "") != "" else ""
    return f"| `{key}` | {_cell(type_in_words(field))} | {_cell(default)} | {_line(field['description'])} |"


def _line(text: str) -> str:
    return _cell(" ".join(text.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
