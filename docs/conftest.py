"""Tests of the pages by their examples. Each page runs in a temporary folder; skipped pages say why."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

LONG = {"camera.md": "it takes minutes: make docs-run"}
"""Pages of `make docs-run`, which sets TRUEUP_DOCS_RUN."""

NEEDED = {
    "boosted-trees.md": "xgboost",
    "data-frames.md": "polars",
    "lightning.md": "lightning",
    "mlflow.md": "mlflow",
    "ray.md": "ray",
    "spark.md": "pyspark",
    "trackers.md": "wandb",
    "transformers.md": "transformers",
}
"""Pages of `make test-integrations` and `make test-spark`, with the library that they need."""

WARNINGS = {
    "mlflow.md": ["ignore"],  # its advice on integer columns, and deprecations of itself
    "ray.md": ["ignore"],  # its advice on devices and versions
    "spark.md": ["ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"],
    "trackers.md": ["ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"],
    "lightning.md": ["ignore"],  # its advice on workers and loggers
    "onnx.md": ["ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning"],  # torch's exporter, of itself
    "auto.md": ["ignore:class 2 is"],
    "forest.md": ["ignore:.*exact zeros among"],
    "stated-confidence.md": ["ignore:.*confidences are exactly 0 or 1", "ignore:.*rows were left out"],
}
"""Warnings of libraries, and warnings that a page explains."""


def pytest_collection_modifyitems(items):
    """Skip pages that need missing data or libraries or minutes, and allow the warnings that a page explains."""
    for item in items:
        page = Path(item.path)
        if page.suffix != ".md" or Path(__file__).parent not in page.parents:
            continue
        if "TRUEUP_DATA" in page.read_text() and not os.environ.get("TRUEUP_DATA") and "tutorials" in page.parts:
            item.add_marker(pytest.mark.skip(reason="TRUEUP_DATA is not set: the real data sets are missing"))
        if page.name in LONG and not os.environ.get("TRUEUP_DOCS_RUN"):
            item.add_marker(pytest.mark.skip(reason=LONG[page.name]))
        if page.name in NEEDED and find_spec(NEEDED[page.name]) is None:
            item.add_marker(pytest.mark.skip(reason=f"{NEEDED[page.name]} is not installed: make test-integrations"))
        for warning in WARNINGS.get(page.name, ()):
            item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
    """Run each page in a temporary folder, because it writes pictures and files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its database takes half a minute to make
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    monkeypatch.setenv("WANDB_SILENT", "true")
