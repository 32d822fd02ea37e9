"""Reading a bundle: damage is refused, inputs are checked, actions are drawn as stated."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf as INF
from math import nan as NAN
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from helpers.bundles import graph_outputs
from helpers.runs import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from reagent_lite.errors import BundleError
from reagent_lite.export import Bundle, Prediction, load_bundle
from reagent_lite.manifest import BUNDLE, read_document, seal, seal_folder

WEIGHTS = np.exp([1.5, 2.0, 0.0])
"""Of a softmax over q = (3, 4, 0) at temperature 2."""
FILES = [
    "MODEL_CARD.md",
    "config.json",
    "evaluation.json",
    "golden.json",
    "manifest.json",
    "model.onnx",
    "model.torchscript",
    "normalization.json",
    "weights.safetensors",
]
Copy = Callable[[Path], Path]


@pytest.fixture(scope="module")
def bundle(discrete_folder: Path) -> Bundle:
    return load_bundle(discrete_folder)


@pytest.fixture(scope="module")
def parametric(parametric_folder: Path) -> Bundle:
    return load_bundle(parametric_folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_altered_in_any_way_is_named(name: str, discrete_folder: Path, copied: Copy) -> None:
    """What else a manifest holds files to is tested with it, in tests/test_manifest.py."""
    file = copied(discrete_folder) / name
    whole = file.read_bytes()
    rng = np.random.default_rng(FILES.index(name))
    flipped = [bytearray(whole) for _ in range(5)]
    for altered in flipped:
        altered[int(rng.integers(len(whole)))] ^= int(rng.integers(1, 256))
    for data in (*flipped, whole[:-1], whole + b"\n", b""):
        file.write_bytes(data)
        with pytest.raises(BundleError) as caught:
            load_bundle(file.parent)
        assert {problem.where for problem in caught.value.problems} == {str(file)}


@pytest.mark.parametrize(
    ("name", "make"),
    [("manifest.json", lambda file: file.symlink_to("config.json")), ("evaluation.json", os.mkfifo)],
)
def test_links_and_fifos_are_no_files_of_a_bundle(
    discrete_folder: Path, copied: Copy, name: str, make: Callable[[Path], None]
) -> None:
    file = copied(discrete_folder) / name
    file.unlink()
    make(file)
    with pytest.raises(BundleError, match="not a regular file"):
        load_bundle(file.parent)


def test_files_and_manifest_describe_the_model(bundle: Bundle, discrete_folder: Path, parametric_folder: Path) -> None:
    assert [sorted(os.listdir(folder)) for folder in (discrete_folder, parametric_folder)] == [FILES, FILES]
    assert (bundle.workflow, bundle.state_feature_ids, bundle.action_names, bundle.policy) == (
        "dqn", (7, 4), ("left", "right", "stay"), {"kind": "epsilon_greedy", "epsilon": 0.3},
    )  # fmt: skip
    assert repr(bundle).startswith("<Bundle dqn: state features 7, 4; actions left, right, stay; policy ")
    assert "; candidates of 9; " in repr(load_bundle(parametric_folder))
    assert bundle.manifest["files"]["config.json"]["size"] == (discrete_folder / "config.json").stat().st_size
    assert json.loads((discrete_folder / "evaluation.json").read_text()) == {"reward": {"value": 1.5, "lower": None}}


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_sealed_manifest_of_any_shape_is_a_bundle_or_a_bundle_error(
    data: st.DataObject, discrete_folder: Path, bundle: Bundle, tmp_path: Path
) -> None:
    folder = shutil.copytree(discrete_folder, tmp_path / "any", dirs_exist_ok=True)
    key = data.draw(st.sampled_from([*bundle.manifest, ""]))
    document = (
        data.draw(st.dictionaries(st.sampled_from([*bundle.manifest]), ANY_JSON))
        if key in ("files", "")
        else {**bundle.manifest, key: data.draw(ANY_JSON)}
    )
    if data.draw(st.booleans()):
        document.pop(key, None)
    (folder / "manifest.json").write_bytes(seal({**document, "schema_version": 1}))
    with suppress(BundleError):
        assert load_bundle(folder).predict([[1, 5]]).q.tolist() == [[3, 4, 0]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy", {"kind": "softmax", "temperature": -1}),
        ("policy", {"kind": "softmax", "temperature": 0}),
        ("policy", {"kind": "epsilon_greedy", "epsilon": 5}),
        ("policy", {"kind": "epsilon_greedy", "epsilon": True}),
        ("state_feature_ids", [7, 7]),
        ("action_names", ["left", "left", "stay"]),
        ("action_names", ["left", "", "stay"]),
        ("workflow", "parametric_dqn"),
        ("policy", None),
        ("policy", {"kind": ["softmax"]}),
        ("state_feature_ids", ["7"]),
    ],
    ids=str,
)
def test_a_manifest_that_no_model_has_is_refused_also_where_its_hash_is_right(
    key: str, value: object, discrete_folder: Path, bundle: Bundle, copied: Copy
) -> None:
    folder = copied(discrete_folder)
    (folder / "manifest.json").write_bytes(seal({**bundle.manifest, key: value}))
    with pytest.raises(BundleError, match=f"manifest.json, {key}: expected"):
        load_bundle(folder)


def scalar_model(file: Path) -> None:
    """Writes a model that takes and returns one number."""
    values, q = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in ("values", "q"))
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["values"], ["q"])], "scalar", [values], [q])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), file)


def resealed(folder: Path, bundle: Bundle) -> Path:
    seal_folder(folder, bundle.manifest, {name: {} for name in bundle.manifest["files"]})
    return folder


@pytest.mark.parametrize(
    "change",
    [scalar_model, lambda file: file.write_bytes(file.read_bytes().replace(b"greedy", b"better"))],
    ids=["a model of one number", "another name of an output"],
)
def test_another_graph_is_refused_also_where_its_hash_is_right(
    change: Callable[[Path], object], discrete_folder: Path, bundle: Bundle, copied: Copy
) -> None:
    folder = copied(discrete_folder)
    change(folder / "model.onnx")
    with pytest.raises(BundleError, match="Export the model again"):
        load_bundle(resealed(folder, bundle))


@pytest.mark.parametrize(
    "change",
    [
        lambda golden: golden.pop("tolerance"),
        lambda golden: golden["tolerance"].update(atol="1"),
        lambda golden: golden["tolerance"].update(atol=float("inf")),
        lambda golden: golden["inputs"].update(values=1.0),
        lambda golden: golden["inputs"].update(values=[[1.0]]),
        lambda golden: golden["inputs"].update(values=[["a", "b"]]),
        lambda golden: golden["inputs"].update(values=[[1.0], [1.0, 2.0]]),
        lambda golden: golden["outputs"].update(q=[]),
        lambda golden: golden["outputs"].update(q=1.0),
        lambda golden: golden["outputs"].update(choices=[[1.0]]),
        lambda golden: golden.clear(),
    ],
)
def test_golden_rows_of_any_shape_are_refused_in_words(
    change: Callable[[Any], object], discrete_folder: Path, bundle: Bundle, copied: Copy
) -> None:
    file = copied(discrete_folder) / "golden.json"
    golden = json.loads(file.read_text())
    change(golden)
    file.write_text(json.dumps(golden))
    with pytest.raises(BundleError, match=r"golden\.json: expected"):
        load_bundle(resealed(file.parent, bundle)).check_golden()


def test_golden_q_and_choices_are_repeated(bundle: Bundle, parametric: Bundle, restricted_folder: Path) -> None:
    restricted = load_bundle(restricted_folder)
    assert [model.check_golden() for model in (bundle, parametric, restricted)] == pytest.approx([0] * 3, abs=1e-5)
    golden = json.loads((restricted_folder / "golden.json").read_text())
    # every second row has its first action forbidden
    assert golden["outputs"]["choices"] == [[True, False, True], [False, False, True]] * 2 + [[True, False, True]]
    golden["outputs"]["q"][0][0] += 1.0
    for match in (r"1 of 15, the furthest by 1", r"golden.json, choices: .*7 of 15"):
        files = {**restricted._files, "golden.json": json.dumps(golden).encode()}
        with pytest.raises(BundleError, match=match):
            Bundle(restricted.manifest, restricted._session, files).check_golden()
        golden["outputs"]["choices"] = [[True] * 3] * 5


@pytest.mark.parametrize(
    ("folder", "given", "expected"),
    [
        # (b, z) = (1, 2): q = (3, 4, 0); (0, 0): q = (0, 0, 1); by softmax(q / 2) over what is allowed
        ("softmax_folder",
         {"values": [[1.0, 5.0], [NAN, 1.0], [1.0, 5.0], [1.0, 5.0]],
          "mask": np.array([[True, True, True], [True, True, False], [True, False, True], [False, False, False]])},
         {"q": [[3, 4, 0], [0, 0, 1], [3, 4, 0], [3, 4, 0]], "greedy": [1, 0, 0, -1],
          "propensities": [WEIGHTS / WEIGHTS.sum(), [0.5, 0.5, 0],
                           WEIGHTS * [1, 0, 1] / (WEIGHTS[0] + WEIGHTS[2]), [0, 0, 0]]}),
        # infinity that is not there is not read
        ("discrete_folder", {"values": [[1, 5]], "presence": np.array([[False, True]])}, {"q": [[2, 4, 1]]}),
        ("discrete_folder", {"values": [[1, INF]], "presence": np.array([[True, False]])}, {"q": [[1, 0, 0]]}),
        ("discrete_folder", {"states": [{"4": 5, "7": 1.0}, {4: None}, {}]}, {"q": [[3, 4, 0], [0, 0, 1], [0, 0, 1]]}),
        ("discrete_folder", {"values": np.zeros((0, 2))}, {"q": np.zeros((0, 3))}),
        # q = (3, 4, 0) and action 1 excluded: epsilon 0.3 over two choices gives 0.85 and 0.15; where nothing else is
        # open, action 1 is the likeliest of those that are
        ("restricted_folder", {"values": [[1, 5], [1, 5]], "mask": [[True] * 3, [False, True, False]]},
         {"q": [[3, 4, 0]] * 2, "mask": [[True, False, True], [False, True, False]], "greedy": [0, 1],
          "propensities": [[0.85, 0, 0.15], [0, 1, 0]]}),
        # candidates 0..k-1 at state s: mean (k - 1) / 2, q = s + f - mean; the last is the best
        ("parametric_folder",
         {"states": [{"3": 10.0}] * 3, "candidates": [[{"9": float(f)} for f in range(k)] for k in (1, 3, 7)]},
         {"q": [[10.0 + f - (k - 1) / 2 for f in range(k)] + [NAN] * (7 - k) for k in (1, 3, 7)], "greedy": [0, 2, 6],
          "propensities": [[0.3 / k] * (k - 1) + [0.7 + 0.3 / k] + [0] * (7 - k) for k in (1, 3, 7)]}),
        # candidates 1 and 5, the second forbidden: mean 1; none; a missing candidate feature reads 0
        ("parametric_folder",
         {"values": [[2.0], [3.0], [NAN]], "candidates": [[[1], [5]], [], np.array([[NAN]])],
          "mask": np.array([[True, False], [True, True], [True, True]])},
         {"q": [[2, 6], [NAN, NAN], [0, NAN]], "greedy": [0, -1, 0],
          "mask": [[True, False], [False, False], [True, False]]}),
    ],
)  # fmt: skip
def test_predictions_by_hand(
    folder: str, given: dict[str, Any], expected: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = load_bundle(request.getfixturevalue(folder))
    prediction = (model.predict if "values" in given else model.predict_rows)(**given)
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(prediction, name), values, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.table])
def test_columns_of_a_frame_are_found_by_name(frame: Callable[..., Any], bundle: Bundle, parametric: Bundle) -> None:
    assert bundle.predict(frame({"name": ["a", "b"], "4": [5.0, None], "7": [1, 0]})).q.tolist() == [
        [3, 4, 0],
        [0, 0, 1],
    ]
    # only missing values; true counts as 1
    prediction = bundle.predict(frame({"4": [None, None], "7": [True, False]}))
    assert prediction.q.tolist() == bundle.predict_rows([{"7": 1}, {"7": 0}]).q.tolist()
    for read, columns, message in (
        (bundle.predict, {"4": ["1.5"], "7": [1]}, "values, column 4: expected real numbers"),
        (bundle.act, {"4": [5.0], "8": [1.0]}, r"columns 7, 4, got no 7\."),
    ):
        with pytest.raises(BundleError, match=message):
            read(frame(columns))
    assert parametric.predict([[0]], candidates=[frame({"8": ["x", "y"], "9": [1.0, 2.0]})]).q.tolist() == [[-0.5, 0.5]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"values": [[1, 5, 6]]}, r"values: expected shape \[any, 2\], got \[1, 3\]"),
        ({"values": [1, 5]}, r"values: expected shape \[any, 2\], got \[2\]"),
        ({"values": [[1, 5], [1]]}, "values: expected rows of equal length"),
        ({"values": [["1", "5"]]}, "got an array of <U1"),
        ({"values": [[True, False]]}, "got an array of bool"),
        ({"values": [[1, INF]]}, r"values\[0, 1\]: .* got inf"),
        ({"values": [[1e39, 5]]}, r"values\[0, 0\]: expected a finite float32"),
        ({"values": [[1, 5]], "presence": [[1, 1]]}, "presence: expected an array of bool"),
        ({"values": [[1, 5]], "mask": [[True, True]]}, r"mask: expected shape \[1, 3\], got \[1, 2\]"),
        ({"values": [[1, 5]], "candidates": [[[1]]]}, "candidates: expected none"),
        ({"states": [{"7": 1, "5": 2}]}, "feature ids among 7, 4, got '5'"),
        ({"states": [{"7": "a"}]}, r"states\[0\], feature 7: .* got 'a'"),
        ({"states": [{"7": [True]}]}, "or null, got \\[True\\]"),
        ({"states": [[1, 2]]}, r"states\[0\]: expected a map .* got \[1, 2\]"),
        ({"states": {"7": 1}}, "states: expected a list .* got one map"),
        ({"states": [{}, {"4": -1e39}]}, r"states\[1\], feature 4: .* got -1e\+39"),
        ({"states": [{}], "candidates": [["left"]]}, "candidates: expected none"),
        ({"values": [[1]]}, "of candidates: expected 1 list .* got nothing"),
        ({"values": [[1]], "candidates": [[[1]], [[2]]]}, "of candidates: one per row of values, got 2"),
        ({"values": [[1]], "candidates": [[[1, 2]]]}, r"of candidates: candidates\[0\]: expected shape \[any, 1\]"),
        ({"values": [[1]], "candidates": [[[2], [-INF]]]}, r"of candidates: candidates\[0, 1, 0\]: "),
        ({"states": [{}], "candidates": [[{"9": 1}, {"8": 1}]]}, r"of candidates: candidates\[0\]\[1\]: "),
    ],
)
def test_wrong_input_is_refused(given: dict[str, Any], message: str, bundle: Bundle, parametric: Bundle) -> None:
    model = parametric if message.startswith("of candidates: ") else bundle
    with pytest.raises(BundleError, match=message.removeprefix("of candidates: ")):
        (model.predict if "values" in given else model.predict_rows)(**given)


@pytest.mark.parametrize(
    ("folder", "allowed", "weights"),
    [
        # q = (3, 4, 0), the third forbidden, epsilon 0.3
        ("discrete_folder", [True, True, False], [0.15, 0.85]),
        ("softmax_folder", [True] * 3, WEIGHTS),
    ],
)
def test_frequencies_are_the_stated_propensities(
    folder: str, allowed: list[bool], weights: list[float], request: pytest.FixtureRequest
) -> None:
    rows, probabilities = 20_000, np.array(weights) / np.sum(weights)
    actions, propensity = load_bundle(request.getfixturevalue(folder)).act(
        np.tile([1.0, 5.0], (rows, 1)), mask=np.tile(allowed, (rows, 1)), rng=0
    )
    np.testing.assert_allclose(propensity, probabilities[actions], rtol=1e-6)
    assert chisquare(np.bincount(actions, minlength=len(weights)), rows * probabilities).pvalue > 0.001


def test_acting_where_nothing_one_or_a_candidate_is_allowed(bundle: Bundle, parametric: Bundle) -> None:
    drawn = bundle.act([[1, 5], [1, 5]], mask=np.array([[False] * 3, [False, False, True]]))
    assert [column.tolist() for column in drawn] == [[-1, 2], [0, 1]]
    # two candidates: 0.85 on the better, 0.15 on the other; one candidate: certain
    (first, second), propensity = parametric.act([[0.0], [0.0]], candidates=[[[1.0], [2.0]], [[1.0]]])
    assert (second, propensity.tolist()) == (0, pytest.approx([0.85 if first == 1 else 0.15, 1.0]))


def test_the_graph_alone_gives_no_answer_to_infinity(discrete_folder: Path, parametric_folder: Path) -> None:
    """A graph cannot raise: q is NaN, the choice -1 and propensities 0. Infinity that is not there is not read."""
    values = np.array([[1, 5], [1, -INF]], np.float32)
    q, greedy, propensities, _ = graph_outputs(discrete_folder, values, np.ones((2, 2), bool), np.ones((2, 3), bool))
    np.testing.assert_array_equal(q, [[3, 4, 0], [NAN] * 3])
    np.testing.assert_allclose(propensities, [[0.1, 0.8, 0.1], [0, 0, 0]], rtol=1e-6)
    assert greedy.tolist() == [1, -1]
    # candidates 4 and missing, which reads as 0: their mean is 2; in the first row the third is padding
    candidates = np.array([[[4], [NAN], [INF]], [[4], [1], [INF]]], np.float32)
    mask = np.array([[True, True, False], [True] * 3])
    q, greedy, *_ = graph_outputs(parametric_folder, np.zeros((2, 1), np.float32), np.zeros((2, 1), bool), candidates,
                                  ~np.isnan(candidates), mask)  # fmt: skip
    assert (q[0, :2].tolist(), greedy.tolist()) == ([2, -2], [0, -1])
    assert np.isnan(q[1]).all()


@pytest.mark.parametrize(("drawn", "expected"), [(np.nextafter(1.0, 0.0), [3, 1, -1]), (0.0, [1, 1, -1])])
def test_draw_never_takes_what_has_no_probability(
    drawn: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = SimpleNamespace(random=lambda size: np.full(size, drawn))
    monkeypatch.setattr(np.random, "default_rng", lambda _: rng)
    chances = np.array([[0.0, 0.7, 0.1, 0.2000000000000002, 0.0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    actions, propensities = Prediction(q=chances, greedy=None, propensities=chances, mask=chances > 0).draw()
    taken = [0 if action < 0 else chances[row, action] for row, action in enumerate(expected)]
    assert (actions.tolist(), propensities.tolist()) == (expected, pytest.approx(taken))


def test_the_small_distribution_reads_with_numpy_and_onnxruntime_only_and_collects_nothing(
    discrete_folder: Path, tmp_path: Path
) -> None:
    """By itself onnxruntime opens a database below the user's cache, and sends what is in it."""
    shipped = tomllib.loads((ROOT / "deploy/bundle/pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    for name in shipped:
        file = Path(f"{name.replace('.', '/')}.py")
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    program = f"""
import json, os, sys
for name in ("torch", "pydantic", "pandas", "pyarrow", "onnx", "safetensors", "scipy"):
    sys.modules[name] = None  # importing it fails
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(one)]  # which finds the checkout's modules
import numpy as np
import reagent_lite
from reagent_lite import load_bundle
bundle = load_bundle({str(discrete_folder)!r})
assert bundle.check_golden() < 1e-5
action, propensity = bundle.act([[1, 5]], rng=0)
modules = sorted(name for name in sys.modules if name.startswith("reagent_lite"))
files = [os.path.realpath(f"/proc/self/fd/{{name}}") for name in os.listdir("/proc/self/fd")]
refused = []
for name in ("train", "read_log"):
    try:
        getattr(reagent_lite, name)
    except ImportError as error:
        refused.append(str(error))
greedy = bundle.predict_rows([{{"4": 5, "7": 1}}]).greedy.tolist()
print(json.dumps([greedy, action.tolist(), modules, [file for file in files if "onnxruntime.db" in file], refused]))
"""
    variables = {name: os.environ[name] for name in os.environ.keys() - {"ORT_DISABLE_TELEMETRY", "PYTHONPATH"}}
    result = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True,
                            cwd=tmp_path, timeout=60)  # fmt: skip
    *printed, refused = json.loads(result.stdout)
    assert printed == [[1], [1], sorted(name.removesuffix(".__init__") for name in shipped), []]
    for name, message in zip(("train", "read_log"), refused, strict=True):
        assert re.match(rf"reagent_lite\.{name}: .*pip install 'reagent-lite\[data\]'", message)
    assert result.stderr == ""


def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(
    discrete_folder: Path, copied: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = copied(discrete_folder)
    document = read_document(served, BUNDLE)
    (served / "MODEL_CARD.md").write_text("another one")  # an older bundle, sealed anew
    seal_folder(served, {**document, "steps": 1}, {name: {} for name in document["files"]})
    assert load_bundle(served).manifest["steps"] == 1
    read = Path.iterdir

    def replaced(folder: Path) -> Iterator[Path]:
        """Lists the bundle's files, after the newer bundle took its place; its manifest has been read by then."""
        if folder == served and not (tmp_path / "older").exists():
            served.rename(tmp_path / "older")
            shutil.copytree(discrete_folder, served)
        return read(folder)

    monkeypatch.setattr(Path, "iterdir", replaced)
    assert load_bundle(served).manifest["steps"] == document["steps"]
