"""What the features of a training copy are: the same as those of the files it was made from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.logs import candidate_rows, random_rows, write_lines

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.copy import feature_summaries
from reagent_lite.data.copy.feature_summaries import summarize_copy
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import empty_training_copy
from reagent_lite.data.features.log_features import summarize_log
from reagent_lite.data.logs import Log

SETTINGS = NormParams(num_samples=40)


@pytest.mark.parametrize("parametric", [False, True])
def test_a_copy_has_the_features_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parametric: bool
) -> None:
    monkeypatch.setattr(feature_summaries, "_BLOCK_BYTES", 600)  # some twenty rows
    file = write_lines(tmp_path / "log.jsonl", candidate_rows(300) if parametric else random_rows(300))
    copy = prepare_training_copy(Log(str(file), actions=None if parametric else ("a", "b")))
    log = summarize_log(Log(str(file)).files, SETTINGS, seed=3)
    assert set(log.columns) == ({"state_features", "action"} if parametric else {"state_features"})
    for name, expected in log.columns.items():
        of_copy = summarize_copy(copy, name, SETTINGS, seed=3)
        assert (of_copy.rows, sorted(of_copy.hashes)) == (expected.rows, sorted(expected.hashes))
        for feature_id, summary in of_copy.features.items():
            theirs = expected.features[feature_id]
            assert replace(summary, moments=theirs.moments) == theirs
            moments = [(each.moments.count, each.moments.mean, each.moments.stddev) for each in (summary, theirs)]
            np.testing.assert_allclose(*moments, rtol=1e-12)
            np.testing.assert_array_equal(of_copy.sample_values(feature_id), expected.sample_values(feature_id))


def test_a_machine_without_rows_has_no_features() -> None:
    nothing = summarize_copy(empty_training_copy(None), "action", SETTINGS, seed=0)
    assert (nothing.rows, nothing.features, len(nothing.hashes)) == (0, {}, 0)
