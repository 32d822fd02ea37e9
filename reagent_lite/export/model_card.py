"""MODEL_CARD.md: inputs, decisions and measured value of a model, for a reader who has only the folder."""

import json
import re
from html import escape
from typing import Final

from reagent_lite.errors import join_names, pluralize, printable
from reagent_lite.export.bundle_content import BundleContent
from reagent_lite.export.exploration import EXPLORE, lack_of_exploration
from reagent_lite.export.feature_set import features_of_ids
from reagent_lite.export.predictor import Predictor
from reagent_lite.item_table import ITEMS_FILE, ItemTable
from reagent_lite.types import FIRST_ROW

_USE: Final = """```python
from reagent_lite import load_bundle

bundle = load_bundle("model")
prediction = bundle.predict_rows([{state}]{candidates})  # {missing}
prediction.greedy  # {greedy}
prediction.draw()  # drawn from the policy: index and propensity, to log with the decision
```

Loading compares every byte with `manifest.json` and needs only numpy and onnxruntime. Programs in other languages run
`model.onnx` in an ONNX runtime:

| tensor | type | shape | meaning |
|---|---|---|---|
{tensors}

or load `model.torchscript`: `forward({pairs})` returns {returned}.{refuses}"""
_TENSORS: Final = {
    "image": ("uint8", "the state, pixels from 0 to 255"),
    "values": ("float32", "state features in the order below; NaN where missing"),
    "presence": ("bool", "false where a state feature is missing"),
    "action_values": ("float32", "features of each candidate in the order below; NaN where missing"),
    "action_presence": ("bool", "false where a candidate's feature is missing"),
    "action_mask": ("bool", "true where a choice exists and is allowed"),
    "q": ("float32", "{score} of each choice, allowed or not"),
    "greedy": ("int64", "index of the largest q among `choices`; -1 if there is none"),
    "propensities": ("float32", "probability that the policy takes each choice"),
    "choices": ("bool", "true where the policy may take a choice"),
}
_CODES: Final = (
    "`load_bundle` takes the strings of categories. In tensors of `model.onnx` and `model.torchscript` a level is its "
    "code; any other number counts as other and has no column."
)
_LIMITS: Final = (
    "NaN, an absent feature and -1337.1337 mean missing; infinity is refused. The lowest index wins a tie. A row "
    "without an allowed choice gets choice -1. Off-policy estimates hold for the logged population and horizon: "
    "read their intervals and verdicts before the point estimates. The hashes protect against damage, not against "
    "deliberate changes."
)


def model_card(predictor: Predictor, content: BundleContent, certain_share: float) -> str:
    """Returns the card in Markdown.

    Args:
        predictor: the model.
        content: the contents besides the model.
        certain_share: share of the sample's decisions that the policy takes with certainty.
    """
    sections = {
        "Use": _use(predictor, content),
        "Choices": _choices(predictor, content.items),
        "Policy": _policy(predictor, certain_share),
        "State features": _state(predictor, content),
        **_candidates(predictor, content),
        "Evaluation": content.findings or "None was made.",
        "Limits": _LIMITS if predictor.image is None else _LIMITS[_LIMITS.index("The lowest") :],
        "Origin": _origin(content),
    }
    body = "\n".join(f"\n## {title}\n\n{text}" for title, text in sections.items())
    steps = f", {pluralize(content.steps, 'optimizer step')}" if content.steps else ""
    title = f"# {content.workflow} policy{steps}\n"
    decision = f"\n{content.decision}\n" if content.decision else ""
    return f"{title}{decision}{body}\n"


def _use(predictor: Predictor, content: BundleContent) -> str:
    rows = []
    for kind, tensors in (("input", predictor.inputs), ("output", predictor.outputs)):
        for name, axes in tensors.items():
            dtype, what = _TENSORS[name.removeprefix("state_")]
            rows.append(
                f"| {kind} `{name}` | {dtype} | {', '.join(map(str, axes))} | {what.format(score=content.score)} |"
            )
    image = predictor.image
    state = f"{{{_example(predictor.state_feature_ids, content.normalization.get('state', {}), 0.5)}}}"
    first, second = (
        _example(predictor.action_feature_ids, content.normalization.get("action", {}), value) for value in (1.0, 2.0)
    )
    names = list(predictor.inputs)[:-1]
    pairs = ", ".join(f"({values}, {presence})" for values, presence in zip(names[::2], names[1::2], strict=False))
    return _USE.format(
        state=state if image is None else f"np.zeros({image.shape}, np.uint8)",
        missing="absent features are missing" if image is None else "an image; nested lists will do",
        candidates=f", [[{{{first}}}, {{{second}}}]]" if predictor.parametric else "",
        greedy="index in the row's list" if predictor.parametric else "index in bundle.action_names",
        tensors="\n".join(rows),
        pairs=pairs if image is None else "image",
        refuses=" It refuses infinity." if image is None else "",
        returned='["Q"] and q [rows, 1], one row for each pair of state and candidate'
        if predictor.parametric
        else "the names of the actions and q",
    )


def _choices(predictor: Predictor, items: ItemTable | None) -> str:
    if not predictor.parametric:
        return "\n".join(f"{i}. {_code(name)}" for i, name in enumerate(predictor.action_names))
    ids = ", ".join(escape_text(str(feature)) for feature in predictor.action_feature_ids)
    features = f"Each row has a list of candidates of any length. Features of a candidate, in this order: {ids}."
    if items is None:
        return features
    return (
        f"{features}\n\nCandidates may be given by id: {pluralize(len(items), 'item')} in `{ITEMS_FILE}`, hash "
        f"`{items.sha256}`, such as {escape_text(join_names(items.ids))}. `predict_rows` takes lists of ids. Without "
        "lists it chooses among all items, and its indices are those of `bundle.items.ids`."
    )


def _policy(predictor: Predictor, certain_share: float) -> str:
    text = (
        f"{str(predictor.policy).capitalize()}, over the allowed choices. `propensities` are its probabilities; "
        "`draw` and `bundle.act` draw from them. The evaluation below is that of this policy."
    )
    if lack := lack_of_exploration(certain_share):
        text += f" It {lack}. One that explores has {EXPLORE}."
    if predictor.threshold is None:
        return text
    return (
        f"{text} A choice is allowed if a model of the log finds it at least {predictor.threshold:g} times as likely "
        "as the likeliest open choice (BCQ): see `choices` of `model.onnx`. q of the other choices was not learned for "
        "use; `model.torchscript` lowers it by 1e10."
    )


def _state(predictor: Predictor, content: BundleContent) -> str:
    if (image := predictor.image) is None:
        return _features(predictor.state_feature_ids, content.normalization.get("state", {}))
    channels, height, width = image.pixels
    return (
        f"An image of shape {list(image.shape)}: {pluralize(channels, 'channel')} of {height} x {width} pixels, "
        "integers from 0 to 255. The model divides them by 255; nothing else is done to them before the convolutions."
    )


def _features(ids: tuple[int, ...], parameters: dict[str, str]) -> str:
    rows = []
    categories = []
    lists = _columns_of_lists(parameters)
    for name in map(str, ids):
        if name in lists:
            rows.append(f"| {escape_text(name)} | {lists[name]} |")
            continue
        feature = json.loads(parameters.get(name, "{}"))
        levels = feature.get("levels") or ()
        kind = f"{pluralize(len(levels), 'level')}, as strings" if levels else feature.get("feature_type", "")
        rows.append(f"| {escape_text(name)} | {kind} |")
        codes = zip(levels, feature.get("possible_values") or (), strict=False)
        categories += [f"| {escape_text(name)} | {_code(level)} | {code!r} |" for level, code in codes]
    table = "\n".join(("| feature, in column order | type |", "|---|---|", *rows))
    if not categories:
        return table
    table_of_codes = "\n".join(("| category | level | code |", "|---|---|---|", *categories))
    return f"{table}\n\n{_CODES}\n\n{table_of_codes}"


def _columns_of_lists(parameters: dict[str, str]) -> dict[str, str]:
    """Returns {column: its meaning} of the features whose values are lists of ids."""
    meanings = {}
    for name, feature in features_of_ids(parameters).items():
        table = json.loads(parameters[name])["embedding"]
        vectors = f"{table['rows'] - FIRST_ROW:,} vectors of {table['dim']}, table {escape_text(table['table'])}"
        for index, column in enumerate(feature.columns):
            what = "code of an id" if index < feature.length else "score of the id"
            meanings[str(column)] = f"EMBEDDING of {escape_text(name)}: {what}; {vectors}"
    return meanings


def _candidates(predictor: Predictor, content: BundleContent) -> dict[str, str]:
    """Returns the section on categories of candidates, if there are any."""
    text = _features(predictor.action_feature_ids, content.normalization.get("action", {}))
    return {"Features of candidates": text} if _CODES in text else {}


def _origin(content: BundleContent) -> str:
    rows = {
        "training data": content.data_hash,
        "config": content.config_hash,
        "git revision": content.git_revision or "none",
        **content.versions,
    }
    return "\n".join(("| of | is |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())))


def _code(text: str) -> str:
    """Returns a code span of the text on one line."""
    line = printable(" ".join(text.split()))
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def escape_text(text: str) -> str:
    """Returns the text on one line, with markup of Markdown and HTML escaped."""
    line = escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"[\\`*\[\]|~:]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)


def _example(ids: tuple[int, ...], parameters: dict[str, str], value: float) -> str:
    """Returns the first feature with a value, as an entry of a Python dict."""
    if not ids:
        return ""
    for name, feature in features_of_ids(parameters).items():
        if feature.columns[0] == ids[0]:
            example: object = {"a": 1.0} if feature.scores else ["a", "b"]
            return f"{name!r}: {'a' if feature.length == 1 and not feature.scores else example!r}"
    levels = json.loads(parameters.get(str(ids[0]), "{}")).get("levels") or ()
    return f"{str(ids[0])!r}: {(levels[int(value) % len(levels)] if levels else value)!r}"
