"""Writing a bundle: it appears whole and checked, or not at all."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bundles import Habit
from helpers.reports import decided
from markdown_it import MarkdownIt
from onnxruntime import InferenceSession
from safetensors.torch import load_file

from reagent_lite.algorithms.bcq import BCQActionFilter
from reagent_lite.errors import BundleError
from reagent_lite.export import load_bundle
from reagent_lite.export.bundle_content import BundleContent, SampleRows
from reagent_lite.export.formats import FORMATS
from reagent_lite.export.model_card import model_card
from reagent_lite.export.predictor import DiscretePredictor
from reagent_lite.export.writer import write_bundle
from reagent_lite.feature_ids import FeatureId
from reagent_lite.report.content import PageSection, Report, Table
from reagent_lite.report.markdown import findings
from reagent_lite.rl.policies import EpsilonGreedy

Make = Callable[..., Path]


@pytest.fixture
def make(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    discrete_folder: Path,
    discrete_predictor: DiscretePredictor,
    discrete_content: BundleContent,
) -> Make:
    """Writes a bundle with the ONNX file of the predictor of the other tests, whatever is exported."""
    stored = replace(FORMATS["onnx"], write=lambda _, path: shutil.copyfile(discrete_folder / "model.onnx", path))
    monkeypatch.setitem(FORMATS, "onnx", stored)

    def write(predictor: DiscretePredictor = discrete_predictor, **changes: Any) -> Path:
        return write_bundle(tmp_path / "out" / "model", predictor, content=replace(discrete_content, **changes))

    return write


def other_weights(predictor: DiscretePredictor) -> DiscretePredictor:
    """The same predictor with q of "left" 0.01 larger."""
    other = copy.deepcopy(predictor)
    other.scorer.get_parameter("bias").data[0] += 0.01
    return other


@pytest.mark.parametrize("change", [{"ratio_different": 0.34}, {"rtol": 0.003}, {"atol": 0.011}])
def test_tolerance_is_used(
    change: dict[str, float], make: Make, discrete_predictor: DiscretePredictor, discrete_content: BundleContent
) -> None:
    # one action of three differs, by 0.01 of a largest |q| of 4: a share of 1/3, 0.0025 relative; the others are strict
    folder = make(other_weights(discrete_predictor), tolerance=replace(discrete_content.tolerance, **change))
    assert load_bundle(folder).check_golden() == pytest.approx(0.01, abs=1e-5)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("policy", EpsilonGreedy(), r"model.onnx, propensities: .* got 0\.2"),
        ("restriction", BCQActionFilter(Habit([0.5, 0.04, 0.46]), 0.1), r"model.onnx, choices: 5 of 15 differ"),
        ("restriction", BCQActionFilter(Habit([float("nan")] * 3), 0.1), "choices of the live network"),
    ],
)
def test_a_file_of_another_policy_or_imitator_and_one_that_diverged_are_found(
    part: str, value: Any, words: str, make: Make, discrete_predictor: DiscretePredictor
) -> None:
    setattr(discrete_predictor, part, value)
    with pytest.raises(BundleError, match=words):
        make()


def test_a_checked_bundle_replaces_the_older_one_and_a_failed_one_leaves_nothing(
    make: Make, tmp_path: Path, discrete_predictor: DiscretePredictor
) -> None:
    wrong, failed = other_weights(discrete_predictor), r"model.onnx: .* share of 0\.0 of q"
    with pytest.raises(BundleError, match=failed):
        make(wrong)
    assert not (tmp_path / "out").exists()
    make(steps=1)
    folder = make(steps=2)
    with pytest.raises(BundleError, match=failed):
        make(wrong, steps=3)
    assert load_bundle(folder).manifest["steps"] == 2
    assert os.listdir(tmp_path / "out") == ["model"]


def test_everything_is_synced_before_the_rename_and_readable_by_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
    mask = os.umask(0o022)
    files = sorted(make().iterdir())
    os.umask(mask)
    *names, folder, parent = synced[-len(files) - 2 :]
    assert (names, folder[:7], parent) == ([file.name for file in files], ".model.", "out")
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}


# web pages have a manifest too
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("out", "a file", r"out.model: .*Set model_output_path"),
        ("out/model", "a file", "got something else"),
        ("out/model/thesis.tex", "years", "got something else"),
        ("out/model/manifest.json", '{"a": 1}', "got something else"),
    ],
)
def test_what_is_no_bundle_is_not_deleted(make: Make, tmp_path: Path, name: str, text: str, words: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    with pytest.raises(BundleError, match=words):
        make()
    assert file.read_text() == text


def test_the_callers_predictor_stays_as_it_is(make: Make, discrete_predictor: DiscretePredictor) -> None:
    make(discrete_predictor.train().requires_grad_(True))
    assert discrete_predictor.training
    assert all(parameter.requires_grad for parameter in discrete_predictor.parameters())


def test_sample_is_limited_in_golden_but_not_in_the_check(make: Make) -> None:
    values = np.ones((50, 2), dtype=np.float32)
    golden = json.loads((make(sample=SampleRows(values=values)) / "golden.json").read_text())
    assert len(golden["inputs"]["values"]) == 32
    values[49] = np.inf  # beyond the golden rows
    with pytest.raises(BundleError, match="q of the live network"):
        make(sample=SampleRows(values=values))


def test_the_card_describes_the_model(discrete_folder: Path, parametric_folder: Path, restricted_folder: Path) -> None:
    card, of_candidates, restricted = (
        (folder / "MODEL_CARD.md").read_text() for folder in (discrete_folder, parametric_folder, restricted_folder)
    )
    assert card.startswith("# dqn policy, 12 optimizer steps\n")
    assert {"1. `right`", "| 7 | BINARY |", "None was made."} <= {*card.splitlines()}
    assert "Epsilon-greedy at epsilon 0.3, over the allowed choices." in card
    assert "in this order: 9." in of_candidates
    assert ["at least 0.1 times as likely" in text for text in (card, restricted)] == [False, True]
    types = {"tensor(float)": "float32", "tensor(bool)": "bool", "tensor(int64)": "int64"}
    for folder, text in ((discrete_folder, card), (parametric_folder, of_candidates)):
        session = InferenceSession(folder / "model.onnx")
        rows = [
            f"| {kind} `{tensor.name}` | {types[tensor.type]} | {', '.join(map(str, tensor.shape))} |"
            for kind, tensors in (("input", session.get_inputs()), ("output", session.get_outputs()))
            for tensor in tensors
        ]
        assert [row for row in rows if f"\n{row}" not in text] == []


def test_the_card_shows_names_as_they_are(
    discrete_predictor: DiscretePredictor, discrete_content: BundleContent
) -> None:
    names = ("<script>x</script> ``a`` | b", "*[l](http://x)*\n# head", "_plain_")
    vars(discrete_predictor).update(action_names=names, step_feature_ids=tuple(map(FeatureId, names)))
    table = Table(title="t", columns=(("a|b", "name"), ("c", "name")), rows=[(name, name) for name in names])
    text = findings(Report(title="t", decision=decided(), notes=names,
                           sections=(PageSection(title="s", tables=(table,)),)))  # fmt: skip
    card = model_card(discrete_predictor, replace(discrete_content, decision="**Ship**: why", findings=text), 0.0)
    page = MarkdownIt("commonmark").enable("table").render(card)
    assert [page.count(tag) for tag in ("<script", "<a ", "<em>", "<h1>")] == [0, 0, 0, 1]
    assert page.split("\n")[1] == "<p><strong>Ship</strong>: why</p>"
    page = page.replace("<p>", "").replace("</p>", "").replace(">\n<", "><")
    for name in names:
        shown = escape(" ".join(name.split()))
        for words in (f"<li><code>{shown}</code></li>", f"<td>{shown}</td><td>{shown}</td>",
                      f"<td>{shown}</td><td></td>", f"<strong>Warning</strong>: {shown}"):  # fmt: skip
            assert words in page
    assert "<th>a|b</th>" in page


def test_the_imitator_is_written(restricted_folder: Path, discrete_folder: Path) -> None:
    weights = load_file(restricted_folder / "weights.safetensors")
    torch.testing.assert_close(weights["behavior_cloning.logits"].exp(), torch.tensor([0.5, 0.04, 0.46]))
    assert weights.keys() - load_file(discrete_folder / "weights.safetensors").keys() == {"behavior_cloning.logits"}


def test_the_card_s_code_runs(discrete_folder: Path, parametric_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (discrete_folder, parametric_folder):
        code = (folder / "MODEL_CARD.md").read_text().split("```python\n")[1].split("```")[0]
        monkeypatch.chdir(folder.parent)
        exec(code, names := {})
        assert names["bundle"].manifest["steps"] == 12
