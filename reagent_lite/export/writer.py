"""Writes a bundle, which appears under its final name once every file has been read back and checked.

1 write    model files, JSON, golden.json, MODEL_CARD.md and at last manifest.json, in a temporary folder
2 check    each file against the live predictor, on the sample rows, and on 1 row and 1000 rows with features removed;
           the bundle is loaded, and the predictions of golden.json are repeated
3 replace  fsync; the folder takes the place of an older model in one step, and the older one is removed
"""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.console import logger
from reagent_lite.errors import BundleError, Problem, pluralize
from reagent_lite.export.bundle import CONFIG_FILE, EVALUATION_FILE, GOLDEN_FILE, NORMALIZATION_FILE, load_bundle
from reagent_lite.export.bundle_content import BundleContent, SampleRows
from reagent_lite.export.exploration import certain_share
from reagent_lite.export.formats import FORMATS, has_own_network
from reagent_lite.export.model_card import model_card
from reagent_lite.export.predictor import Inputs, Predictor, Replay
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.feature_ids import write_ids
from reagent_lite.item_table import ITEMS_FILE
from reagent_lite.manifest import FILE_NAME, canonical, seal_folder
from reagent_lite.rl.policies import policy_json
from reagent_lite.types import Image
from reagent_lite.whole_files import appearing_folder, scratch_folder

_GOLDEN_ROWS: Final = 32
_GOLDEN_BYTES: Final = 1 << 14
_MANY_ROWS: Final = 1000
_MANY_BYTES: Final = 1 << 22
_MOST_CANDIDATES: Final = 16
_MISSING: Final = 0.3
_LARGEST: Final = 3e38
_MOST_ALONE: Final = 64


def write_bundle(folder: Path, predictor: Predictor, *, content: BundleContent) -> Path:
    """Writes and checks an exported model, then replaces an older one.

    Args:
        folder: final name of the bundle; its parents are created.
        predictor: the model; a copy in evaluation mode on the CPU is exported.
        content: the contents besides the model.

    Returns:
        `folder`.

    Raises:
        BundleError: the folder cannot be written or contains something other than a bundle, or a file that was read
            back differs from the live predictor. Nothing is exported then, and an older bundle stays.
    """
    require_replaceable(folder)
    live = copy.deepcopy(predictor).cpu().eval().requires_grad_(False)
    try:
        with appearing_folder(folder, served=True) as writing:
            _write_files(writing, live, content)
            _check(writing, live, content)
    except OSError as error:
        advice = "Set model_output_path to a folder that this process may write and that has space"
        raise BundleError(Problem(str(folder), "a folder to write the model to", str(error), advice)) from error
    return folder


def require_formats(predictor: Predictor, sample: SampleRows, tolerance: Tolerance) -> None:
    """Checks that a model can be exported: writes temporary files and compares them with the predictor.

    Raises:
        BundleError: the outputs of a file differ, or those of the predictor are not finite.
        Exception: a format does not support a call of the network; of any class.
    """
    live = copy.deepcopy(predictor).cpu().eval().requires_grad_(False)
    batches = list(check_batches(graph_inputs(live, sample), np.random.default_rng(0)))
    check_live(live, batches)
    with scratch_folder() as folder:
        _write_formats(folder, live)
        _check_formats(folder, live, batches, tolerance)


def require_replaceable(folder: Path) -> None:
    """Checks that a folder is absent, empty or an older model, so that a model may replace it.

    Raises:
        BundleError: the folder contains anything else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        manifest = json.loads((folder / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not manifest.keys() >= {"schema_version", "workflow", "files"}:
        advice = "It would be deleted: move it, or export to another name"
        raise BundleError(Problem(str(folder), "no such path, or an older model", "something else", advice))


def _write_files(writing: Path, live: Predictor, content: BundleContent) -> None:
    _write_formats(writing, live)
    documents: dict[str, dict[str, Any]] = {
        NORMALIZATION_FILE: dict(content.normalization),
        CONFIG_FILE: content.config,
        EVALUATION_FILE: content.evaluation,
        GOLDEN_FILE: _compute_golden(live, content),
    }
    for name, document in documents.items():
        (writing / name).write_bytes(canonical(_finite(document)))
    if content.items is not None:
        (writing / ITEMS_FILE).write_bytes(content.items.json())
    card = model_card(live, content, _certain_share(live, content))
    (writing / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    seal_folder(writing, _manifest(live, content))


def _write_formats(folder: Path, live: Predictor) -> None:
    for export_format in FORMATS.values():
        export_format.write(live, folder / export_format.file)


def _check_formats(folder: Path, live: Predictor, batches: list[Inputs], tolerance: Tolerance) -> None:
    for export_format in FORMATS.values():
        replay = export_format.replay(live, folder / export_format.file)
        check_file(export_format.file, replay, batches, tolerance)
        if export_format is FORMATS["onnx"] and has_own_network(live) and live.image is None:
            check_special(export_format.file, replay, batches[0], tolerance)


@torch.inference_mode()
def _certain_share(live: Predictor, content: BundleContent) -> float:
    outputs = dict(zip(live.outputs, live(*graph_inputs(live, content.sample)), strict=True))
    return certain_share(outputs["propensities"].numpy(), outputs["choices"].numpy())


@torch.inference_mode()
def _compute_golden(live: Predictor, content: BundleContent) -> dict[str, Any]:
    """Returns inputs, outputs and tolerance; in every second row the first of several choices is forbidden."""
    rows = _GOLDEN_ROWS if live.image is None else min(_GOLDEN_ROWS, _GOLDEN_BYTES // live.image.size + 2)
    inputs = graph_inputs(live, content.sample[:rows])
    mask = inputs[-1]
    mask[1::2, 0] &= mask[1::2].sum(1) < 2
    outputs = live(*inputs)
    return {
        "inputs": {name: tensor.tolist() for name, tensor in zip(live.inputs, inputs, strict=True)},
        "outputs": {name: tensor.tolist() for name, tensor in zip(live.outputs, outputs, strict=True)},
        "tolerance": asdict(content.tolerance),
    }


def _manifest(live: Predictor, content: BundleContent) -> dict[str, Any]:
    return {
        "workflow": content.workflow,
        "state_feature_ids": write_ids(live.step_feature_ids),
        **({"history": live.history} if live.history > 1 else {}),
        "action_feature_ids": write_ids(live.action_feature_ids),
        "action_names": list(live.action_names),
        "policy": policy_json(live.policy),
        "steps": content.steps,
        "data_hash": content.data_hash,
        "config_hash": content.config_hash,
        "versions": content.versions,
        "git_revision": content.git_revision,
    }


def _finite(value: Any) -> Any:
    """Returns JSON with null for NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check(writing: Path, live: Predictor, content: BundleContent) -> None:
    inputs = graph_inputs(live, content.sample)
    batches = list(check_batches(inputs, np.random.default_rng(0)))
    check_live(live, batches)
    _check_formats(writing, live, batches, content.tolerance)
    load_bundle(writing).check_golden()


def graph_inputs(predictor: Predictor, sample: SampleRows) -> Inputs:
    """Returns rows as inputs of the exported graph, in the order of `Predictor.inputs`."""
    num_choices = len(predictor.action_names) if sample.candidates is None else sample.candidates.shape[1]
    mask = np.ones((len(sample.values), num_choices), np.bool_) if sample.mask is None else sample.mask
    state = _with_presence(sample.values) if predictor.image is None else _as_images(sample.values, predictor.image)
    candidates = () if sample.candidates is None else _with_presence(sample.candidates)
    return (*state, *candidates, torch.from_numpy(np.array(mask, dtype=np.bool_)))


def check_batches(inputs: Inputs, rng: np.random.Generator) -> Iterator[Inputs]:
    """Yields the sample, 1 and 1000 rows drawn from it with some features and choices removed, and 1 without features.

    Candidates are drawn as well, so that their number differs from the sample's.
    """
    yield inputs
    is_image = inputs[0].dtype == torch.uint8
    for num_rows in (1, min(_MANY_ROWS, _MANY_BYTES // inputs[0][0].numel() + 2) if is_image else _MANY_ROWS):
        rows = torch.from_numpy(rng.integers(inputs[0].shape[0], size=num_rows))
        drawn = tuple(tensor[rows] for tensor in inputs)
        if len(drawn) > 3:
            num_choices = drawn[-1].shape[1]
            length = 1 if num_rows == 1 else min(num_choices + 1, _MOST_CANDIDATES)
            candidates = torch.from_numpy(rng.integers(num_choices, size=length))
            drawn = (*drawn[:2], *(tensor[:, candidates] for tensor in drawn[2:]))
        yield tuple(tensor & _random_mask(tensor, rng) if tensor.dtype == torch.bool else tensor for tensor in drawn)
    if not is_image:
        first = [tensor[:1] for tensor in inputs[:-1]]
        missing = [torch.full_like(tensor, torch.nan if tensor.is_floating_point() else False) for tensor in first]
        yield *missing, torch.ones_like(inputs[-1][:1])


@torch.inference_mode()
def check_live(predictor: Predictor, batches: list[Inputs]) -> None:
    """Raises BundleError if a q of the live predictor is not finite, or a row with allowed choices has none left."""
    outputs = [predictor(*inputs) for inputs in batches]
    finite = torch.cat([q.flatten() for q, *_ in outputs]).isfinite()
    if not finite.all():
        got = f"{int((~finite).sum())} of {finite.numel()} are not"
        advice = (
            "The training diverged, a row contains infinity, or a network of your own gives no finite value for a row "
            "with missing features, which are 0: lower the learning rate, or look at the data and the network"
        )
        raise BundleError(Problem("q of the live network", "finite numbers", got, advice))
    pairs = zip(batches, outputs, strict=True)
    rows_without = sum(int((inputs[-1].any(1) & ~choices.any(1)).sum()) for inputs, (*_, choices) in pairs)
    if rows_without:
        got = f"none in {pluralize(rows_without, 'row')}"
        advice = "The model of the log that restricts them diverged: lower the learning rate or look at the data"
        raise BundleError(Problem("choices of the live network", "at least one allowed choice per row", got, advice))


@torch.inference_mode()
def check_file(file: str, replay: Replay, batches: list[Inputs], tolerance: Tolerance) -> float:
    """Compares a written file with the live predictor.

    Args:
        file: name of the file, for the message.
        replay: returns q of the live predictor and of the file.
        batches: inputs of the graph.
        tolerance: allowed difference of q.

    Returns:
        The largest difference of a q.

    Raises:
        BundleError: more q differ than the tolerance allows.
    """
    pairs = [replay(inputs) for inputs in batches]
    live = np.concatenate([live_q.ravel() for live_q, _ in pairs])
    restored = np.concatenate([restored_q.ravel() for _, restored_q in pairs])
    advice = "Nothing was exported. If the difference is float32 noise raise rl.predictor_rtol_check, else report it"
    return tolerance.compare(file, live, restored, advice)


@torch.inference_mode()
def check_special(file: str, replay: Replay, sample: Inputs, tolerance: Tolerance) -> None:
    """Compares a file of torch's exporter with the live predictor where an own network may treat values specially.

    The exporter fixes branches, and writes some calls as others that are equal for usual values only.

    Args:
        file: name of the file, for the message.
        replay: returns q of the live predictor and of the file.
        sample: inputs of the graph.
        tolerance: allowed difference of q.

    Raises:
        BundleError: q that the live network has for NaN, infinities, the largest floats or 0 differ.
    """
    todo = "Nothing was exported. Write the network with calls that torch.onnx.export writes for all values"
    live, written_q = replay(_special(sample))
    finite = np.isfinite(live)
    tolerance.compare(f"{file}, extreme inputs", live[finite], written_q[finite], todo)
    if others := int(np.isfinite(written_q[~finite]).sum()):
        values = pluralize(others, "q is", "q are")
        where = "where those of the live network are NaN or infinite, for infinite or huge inputs"
        logger.warning(f"{file}: {values} finite {where}: refuse these before the file is called, as the server does")


def _special(sample: Inputs) -> Inputs:
    """Returns rows in which all features, and some of one alone, have a value that networks may treat specially."""
    everywhere = (torch.nan, torch.inf, -torch.inf, _LARGEST, -_LARGEST, 0.0)
    width = sample[0].shape[1]
    alone = [(index, value) for index in range(min(width, _MOST_ALONE)) for value in (torch.inf, -torch.inf)]
    rows = len(everywhere) + len(alone)
    special = []
    for tensor in sample:
        repeated = tensor[:1].repeat(rows, *[1] * (tensor.dim() - 1))
        if tensor.dtype == torch.bool:
            repeated = torch.ones_like(repeated)
        else:
            repeated = repeated.nan_to_num()
            for row, value in enumerate(everywhere):
                repeated[row] = value
        special.append(repeated)
    for row, (index, value) in enumerate(alone, len(everywhere)):
        special[0][row, index] = value
    return tuple(special)


def _with_presence(values: NDArray[np.float32]) -> Inputs:
    tensor = torch.from_numpy(np.array(values, dtype=np.float32))
    return tensor, ~torch.isnan(tensor)


def _as_images(values: NDArray[np.uint8], image: Image) -> Inputs:
    return (torch.from_numpy(np.array(values, np.uint8)).view(-1, *image.shape),)


def _random_mask(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.random(tuple(tensor.shape)) >= _MISSING)
