"""The generated pages are those of the keys and docstrings."""

import inspect
import runpy

import pytest
from helpers.runs import ROOT

import reagent_lite
from reagent_lite.config import DqnConfig, check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.reference import reference
from reagent_lite.errors import ConfigError


def test_the_page_of_keys_is_current() -> None:
    assert (ROOT / "docs/reference.md").read_text() == reference(), (
        "run python -m reagent_lite.config.reference > docs/reference.md"
    )


def test_the_page_of_the_python_api_is_current() -> None:
    api = runpy.run_path(str(ROOT / "docs/write_api.py"))["api"]
    assert (ROOT / "docs/api.md").read_text() == api(), "run python docs/write_api.py > docs/api.md"


def test_every_public_function_says_what_it_returns() -> None:
    functions = [getattr(reagent_lite, name) for name in reagent_lite.__all__]
    docs = {each.__name__: inspect.getdoc(each) or "" for each in functions if inspect.isfunction(each)}
    assert [name for name, doc in docs.items() if "Returns:" not in doc] == []


def test_a_key_has_its_own_docstring_before_that_of_its_type() -> None:
    of_evaluate = EvaluateConfig.model_json_schema()["properties"]["possible_items"]["description"]
    of_training = DqnConfig.model_json_schema()["$defs"]["DataConfig"]["properties"]["possible_items"]["description"]
    assert [text.split()[0] for text in (of_evaluate, of_training)] == ["As", "all:"]


def test_keys_that_only_files_of_2019_have_are_accepted_and_not_shown() -> None:
    schema = DqnConfig.model_json_schema()
    assert "cnn_parameters" not in schema["$defs"]["TrainingConfig"]["properties"]
    assert "cnn_parameters" not in reference()
    tree = {"training_data_path": "d", "model_output_path": "o", "actions": ["a", "b"]}
    null, some = ({**tree, "training": {"cnn_parameters": value}} for value in (None, {}))
    assert check(DqnConfig, null) == check(DqnConfig, tree)
    with pytest.raises(ConfigError, match=r"training\.cnn_parameters: expected its default"):
        check(DqnConfig, some)
