"""Before a model appears: every written file, read back, against the live network on raw rows with missing features.

sample rows ─► the rows, 1 row, 1000 rows with features removed ─► live and file ─► Tolerance.compare
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.errors import BundleError, Problem, counted
from reagent_lite.export.content import SampleRows
from reagent_lite.export.formats import Inputs, Replay
from reagent_lite.export.predictor import Predictor
from reagent_lite.export.tolerance import Tolerance

_MANY_ROWS: Final = 1000
_MOST_CANDIDATES: Final = 16
_MISSING: Final = 0.3


def graph_inputs(predictor: Predictor, sample: SampleRows) -> Inputs:
    """Returns the rows as the exported graph's inputs, in the order of `input_names`.

    Raises:
        BundleError: when there are no rows or their shapes do not fit the predictor.
    """
    num_rows = sample.values.shape[0]
    got: tuple[int, ...] = () if sample.candidates is None else sample.candidates.shape
    if predictor.parametric:
        num_choices = got[1] if len(got) == 3 else 0
        expected: tuple[int, ...] = (num_rows, num_choices, len(predictor.action_feature_ids))
    else:
        num_choices, expected = len(predictor.action_names), ()
    mask = np.ones((num_rows, num_choices), dtype=np.bool_) if sample.mask is None else sample.mask
    shapes = {
        "values": (sample.values.shape, (num_rows, len(predictor.state_feature_ids))),
        "candidates": (got, expected),
        "mask": (mask.shape, (num_rows, num_choices)),
    }
    problems = [
        Problem(f"sample rows, {name}", f"shape {wanted}", f"{shape}")
        for name, (shape, wanted) in shapes.items()
        if shape != wanted
    ]
    if num_rows == 0 or num_choices == 0:
        problems.append(Problem("sample rows", "at least one row with one choice", f"{num_rows} x {num_choices}"))
    if problems:
        raise BundleError(problems)
    state = _with_presence(sample.values)
    candidates = () if sample.candidates is None else _with_presence(sample.candidates)
    return (*state, *candidates, torch.from_numpy(np.array(mask, dtype=np.bool_)))


def check_batches(inputs: Inputs, rng: np.random.Generator) -> Iterator[Inputs]:
    """Yields the sample, one row, and 1000 rows drawn from it; the drawn ones with features and choices removed.

    Candidates are drawn with the rows, so that their number differs from the sample's.
    """
    yield inputs
    for num_rows in (1, _MANY_ROWS):
        rows = torch.from_numpy(rng.integers(inputs[0].shape[0], size=num_rows))
        drawn = tuple(tensor[rows] for tensor in inputs)
        if len(drawn) > 3:
            num_choices = drawn[-1].shape[1]
            wanted = 1 if num_rows == 1 else min(num_choices + 1, _MOST_CANDIDATES)
            places = torch.from_numpy(rng.integers(num_choices, size=wanted))
            drawn = (*drawn[:2], *(tensor[:, places] for tensor in drawn[2:]))
        yield tuple(tensor & _kept(tensor, rng) if tensor.dtype == torch.bool else tensor for tensor in drawn)


@torch.inference_mode()
def check_live(predictor: Predictor, batches: list[Inputs]) -> None:
    """Raises BundleError when the live predictor gives a q that is no finite number, or leaves a row no choice."""
    outputs = [predictor(*inputs) for inputs in batches]
    finite = torch.cat([q.flatten() for q, *_ in outputs]).isfinite()
    if not finite.all():
        got = f"{int((~finite).sum())} of {finite.numel()} are not"
        advice = "The training diverged, or a sample row holds infinity: lower the learning rate or look at the data"
        raise BundleError(Problem("q of the live network", "finite numbers", got, advice))
    without = sum(int((inputs[-1].any(1) & ~choices.any(1)).sum())
                  for inputs, (*_, choices) in zip(batches, outputs, strict=True))  # fmt: skip
    if without:
        got = f"none in {counted(without, 'row')}"
        advice = "The imitator of the log diverged: lower the learning rate or look at the data"
        raise BundleError(Problem("choices of the live network", "one at least of those allowed", got, advice))


@torch.inference_mode()
def check_file(file: str, replay: Replay, batches: list[Inputs], tolerance: Tolerance) -> float:
    """Compares a written file with the live predictor.

    Args:
        file: name of the file, for the message.
        replay: see `ExportFormat`.
        batches: graph inputs.
        tolerance: how far q may differ.

    Returns:
        The largest difference of a q.

    Raises:
        BundleError: when more q differ than the tolerance allows.
    """
    pairs = [replay(inputs) for inputs in batches]
    live = np.concatenate([pair[0].ravel() for pair in pairs])
    back = np.concatenate([pair[1].ravel() for pair in pairs])
    advice = "Nothing was exported. If the difference is float32 noise raise rl.predictor_rtol_check, else report it"
    return tolerance.compare(file, live, back, advice)


def _with_presence(values: NDArray[np.float32]) -> Inputs:
    tensor = torch.from_numpy(np.array(values, dtype=np.float32))
    return tensor, ~torch.isnan(tensor)


def _kept(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.random(tuple(tensor.shape)) >= _MISSING)
