"""MODEL_CARD.md: what the model reads, decides and was measured to be worth, for someone who has only the folder."""

import json
import re
from html import escape
from typing import Final

from reagent_lite.export.content import BundleContent
from reagent_lite.export.predictor import Predictor

_USE_DISCRETE: Final = """bundle.predict_rows([{{"{state}": 0.5}}])      # absent features are missing
bundle.act(bundle.states([{{"{state}": 0.5}}]))   # action and its propensity"""
_USE_PARAMETRIC: Final = (
    """bundle.predict_rows([{{"{state}": 0.5}}], candidates=[[{{"{action}": 1.0}}, {{"{action}": 2.0}}]])"""
)


def model_card(predictor: Predictor, content: BundleContent) -> str:
    """Returns the card as Markdown."""
    sections = {
        "Use": _use(predictor),
        "Choices": _choices(predictor),
        "Policy": _policy(predictor),
        "State features": _features(predictor.state_feature_ids, content.normalization.get("state", {})),
        "Evaluation": content.findings or "None was made.",
        "Limits": _limits(predictor),
        "Origin": _origin(content),
    }
    body = "\n".join(f"\n## {title}\n\n{text}" for title, text in sections.items())
    title = f"# {content.workflow} policy, {content.steps} optimizer steps\n"
    decision = f"\n{content.decision}\n" if content.decision else ""
    return f"{title}{decision}{body}\n"


def _use(predictor: Predictor) -> str:
    template = _USE_PARAMETRIC if predictor.parametric else _USE_DISCRETE
    call = template.format(state=_first(predictor.state_feature_ids), action=_first(predictor.action_feature_ids))
    code = f'from reagent_lite.export import load_bundle\n\nbundle = load_bundle("model")\n{call}'
    return (
        f"```python\n{code}\n```\n\nLoading compares every byte with `manifest.json` and needs only numpy and "
        "onnxruntime. `model.onnx` also runs by itself in any ONNX runtime: inputs "
        f"{', '.join(f'`{name}`' for name in predictor.inputs)}; outputs "
        f"{', '.join(f'`{name}`' for name in predictor.output_names)}."
    )


def _choices(predictor: Predictor) -> str:
    if not predictor.parametric:
        return "\n".join(f"{i}. {_code(name)}" for i, name in enumerate(predictor.action_names))
    ids = ", ".join(map(str, predictor.action_feature_ids))
    return f"A list of candidates per row, of any length, each with the features {ids}."


def _policy(predictor: Predictor) -> str:
    drawn = (
        f"{str(predictor.policy).capitalize()}, over the allowed choices. `propensities` are its probabilities, "
        "`bundle.act` draws from them, and the evaluation below is of it."
    )
    if predictor.threshold is None:
        return drawn
    return (
        f"{drawn} Allowed are, of the choices that are open, those that a model of the log finds at least "
        f"{predictor.threshold:g} times as likely as the likeliest of them (BCQ): `choices` of `model.onnx`. q of the "
        "others is given but was not learned for use; `model.torchscript` lowers it by 1e10."
    )


def _features(ids: tuple[int, ...], parameters: dict[str, str]) -> str:
    rows = (f"| {feature} | {_type_of(parameters.get(str(feature)))} |" for feature in ids)
    return "\n".join(("| feature, in column order | type |", "|---|---|", *rows))


def _limits(predictor: Predictor) -> str:
    return (
        "NaN, an absent feature and -1337.1337 mean missing; infinity is refused. Ties go to the lowest index. A row "
        "without an allowed choice gives choice -1. Off-policy estimates hold for the logged population and horizon: "
        "read their intervals and verdicts before the point estimates. The hashes protect against damage, not against "
        "an author with intent."
    )


def _origin(content: BundleContent) -> str:
    rows = {
        "training data": content.data_hash,
        "config": content.config_hash,
        "git revision": content.git_revision or "none",
        **content.versions,
    }
    return "\n".join(("| of | is |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())))


def _code(text: str) -> str:
    """Returns a code span that shows the text as it is, on one line."""
    line = " ".join(text.split())
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def plain(text: str) -> str:
    """Returns the text with what Markdown or HTML would read as markup escaped, on one line."""
    line = escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`*\[\]|~:]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)


def _type_of(parameters: str | None) -> str:
    return "" if parameters is None else str(json.loads(parameters).get("feature_type", ""))


def _first(ids: tuple[int, ...]) -> int | str:
    return ids[0] if ids else ""
