"""Writing a bundle: nothing appears under the final name before every file of it was read back and checked.

predictor, content ─► temporary folder: model files, JSON, golden.json, MODEL_CARD.md, manifest.json last
                   ─► each file against the live predictor; the bundle loaded; golden.json repeated
                   ─► fsync ─► in place of an older model in one step, which is then removed
"""

import copy
import json
import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.bundle import GOLDEN_FILE, load_bundle
from reagent_lite.export.check import check_batches, check_file, check_live, graph_inputs
from reagent_lite.export.content import BundleContent
from reagent_lite.export.formats import FORMATS
from reagent_lite.export.model_card import model_card
from reagent_lite.export.predictor import Predictor
from reagent_lite.feature_ids import written
from reagent_lite.files import appearing_folder
from reagent_lite.manifest import FILE_NAME, canonical, seal_folder
from reagent_lite.rl.policies import policy_json

_GOLDEN_ROWS: Final = 32


def write_bundle(folder: Path, predictor: Predictor, *, content: BundleContent) -> Path:
    """Writes and checks an exported model, then puts it in place of what was there.

    The predictor is copied to the CPU in evaluation mode; the caller's stays as it is.

    Args:
        folder: final name of the bundle; its parents are made.
        predictor: what to export.
        content: everything else.

    Returns:
        `folder`.

    Raises:
        BundleError: when the folder cannot be written or holds something else than a bundle, when a format is unknown,
            or when a file read back differs from the live predictor. Nothing appears then, and an older bundle stays.
    """
    _check_request(folder, content)
    live = copy.deepcopy(predictor).cpu().eval().requires_grad_(False)
    try:
        with appearing_folder(folder, served=True) as writing:
            _write_files(writing, live, content)
            _check(writing, live, content)
    except OSError as error:
        advice = "Set model_output_path to a folder with space that this process may write"
        raise BundleError(Problem(str(folder), "a folder to write the model to", str(error), advice)) from error
    return folder


def _check_request(folder: Path, content: BundleContent) -> None:
    problems = [
        Problem("formats", f"names among {', '.join(FORMATS)}", repr(name))
        for name in content.formats
        if name not in FORMATS
    ]
    if "onnx" not in content.formats:
        problems.append(Problem("formats", "onnx among them: it is what load_bundle reads", str(content.formats)))
    if problems:
        raise BundleError(problems)
    require_replaceable(folder)


def require_replaceable(folder: Path) -> None:
    """Checks that a model may be written in the place of what is there.

    Raises:
        BundleError: it is neither a model nor empty.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        manifest = json.loads((folder / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not manifest.keys() >= {"schema_version", "workflow", "files"}:
        advice = "It would be deleted: move it, or export to another name"
        raise BundleError(Problem(str(folder), "nothing there, or an older model", "something else", advice))


@torch.inference_mode()
def _golden(live: Predictor, content: BundleContent) -> dict[str, Any]:
    """Returns inputs, outputs and tolerance; every second row has its first choice forbidden where it has others."""
    inputs = graph_inputs(live, content.sample[:_GOLDEN_ROWS])
    mask = inputs[-1]
    mask[1::2, 0] &= mask[1::2].sum(1) < 2
    outputs = live(*inputs)
    tolerance = content.tolerance
    return {
        "inputs": {name: tensor.tolist() for name, tensor in zip(live.input_names, inputs, strict=True)},
        "outputs": {name: tensor.tolist() for name, tensor in zip(live.output_names, outputs, strict=True)},
        "tolerance": {
            "atol": tolerance.atol,
            "rtol": tolerance.rtol,
            "ratio_different": tolerance.ratio_different,
        },
    }


def _write_files(writing: Path, live: Predictor, content: BundleContent) -> None:
    for name in content.formats:
        FORMATS[name].write(live, writing / FORMATS[name].file)
    documents: dict[str, dict[str, Any]] = {
        "normalization.json": dict(content.normalization),
        "config.json": content.config,
        "evaluation.json": content.evaluation,
        GOLDEN_FILE: _golden(live, content),
    }
    for name, document in documents.items():
        (writing / name).write_bytes(canonical(_finite(document)))
    (writing / "MODEL_CARD.md").write_text(model_card(live, content), encoding="utf-8")
    seal_folder(writing, _manifest(live, content))


def _manifest(live: Predictor, content: BundleContent) -> dict[str, Any]:
    return {
        "workflow": content.workflow,
        "state_feature_ids": written(live.state_feature_ids),
        "action_feature_ids": written(live.action_feature_ids),
        "action_names": list(live.action_names),
        "policy": policy_json(live.policy),
        "steps": content.steps,
        "data_hash": content.data_hash,
        "config_hash": content.config_hash,
        "versions": content.versions,
        "git_revision": content.git_revision,
    }


def _check(writing: Path, live: Predictor, content: BundleContent) -> None:
    inputs = graph_inputs(live, content.sample)
    batches = list(check_batches(inputs, np.random.default_rng(0)))
    check_live(live, batches)
    for name in content.formats:
        file = FORMATS[name].file
        check_file(file, FORMATS[name].replay(live, writing / file), batches, content.tolerance)
    load_bundle(writing).check_golden()


def _finite(value: Any) -> Any:
    """Returns JSON with null for NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
