"""Names, docstrings, messages and pages in plain English, and every public parameter described.

Packages and pages are added to the sets below when they are done.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import documentation
import language

ROOT = Path(__file__).parents[1]

PLAIN_PACKAGES = [
    "_core",
    "adaptation",
    "clamping",
    "cli",
    "decisions",
    "demo",
    "integrations",
    "io",
    "metrics",
    "reports",
]
"""Folders of `src/trueup` that are scanned."""

PLAIN_PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples",
    "docs/benchmarks.md",
    "docs/citing.md",
    "docs/coming-from.md",
    "docs/events.md",
    "docs/faq.md",
    "docs/files.md",
    "docs/glossary.md",
    "docs/how-to/dask.md",
    "docs/how-to/object-stores.md",
    "docs/llm.md",
    "docs/methods.md",
    "docs/metrics.md",
    "docs/outputs.md",
    "docs/reference.md",
    "docs/significance.md",
    "src/trueup/convert.py",
    "docs/command-line.md",
    "docs/guide.md",
    "docs/how-to/lightning.md",
    "docs/how-to/onnx.md",
    "docs/how-to/transformers.md",
    "docs/index.md",
    "docs/tutorials/images.md",
    "docs/versions.md",
]
"""Pages and other files that are scanned."""

DOCUMENTED = [
    "adaptation",
    "demo",
    "integrations.lightning",
    "integrations.onnx",
    "integrations.sklearn",
    "integrations.torchmetrics",
]
"""Packages and public modules whose public parameters are all described."""

ANY_OBJECT = {
    "adaptation.adapt(labelled)",  # loaders: any iterable of batches
    "adaptation.adapt(loader)",
    "adaptation.adapt(reference)",
    "adaptation.repair(loader)",
    "integrations.lightning.lightning_callback(return)",  # a class of a library that may be absent
    "integrations.onnx.check_export(module)",
    "integrations.onnx.export_table(methods)",
    "integrations.sklearn.CalibratedClassifier(cv)",
    "integrations.sklearn.CalibratedClassifier(estimator)",
    "integrations.sklearn.CalibratedClassifier(method)",
    "integrations.sklearn.CalibratedClassifier(options)",
    "integrations.sklearn.CalibratedClassifier.fit(X)",  # any input of the classifier, such as a list of texts
    "integrations.sklearn.LogitCalibrator(class_names)",
    "integrations.sklearn.LogitCalibrator(method)",
    "integrations.sklearn.LogitCalibrator(options)",
    "integrations.transformers.pipeline(return)",
}
"""Public parameters and results of type `Any`."""

EXCEPTIONS = {
    "src/trueup/integrations/prometheus.py",
}
"""Files that are not scanned yet."""


@pytest.mark.parametrize("package", PLAIN_PACKAGES)
def test_a_package_is_in_plain_english(package):
    findings = language.scan_all([ROOT / "src/trueup" / package])
    assert [str(f) for f in findings if str(Path(f.path).relative_to(ROOT)) not in EXCEPTIONS] == []


@pytest.mark.parametrize("page", PLAIN_PAGES)
def test_a_page_is_in_plain_english(page):
    assert list(map(str, language.scan_all([ROOT / page]))) == []


@pytest.mark.parametrize("package", DOCUMENTED)
def test_every_public_parameter_is_described(package):
    if package.startswith("integrations"):
        pytest.importorskip(package.partition(".")[2]) if package.endswith(("sklearn", "torchmetrics")) else None
    assert documentation.undocumented(package) == []


@pytest.mark.parametrize("package", DOCUMENTED)
def test_public_signatures_have_precise_types(package):
    assert set(documentation.untyped(package)) <= ANY_OBJECT


def test_docstrings_agree_with_signatures():
    pytest.importorskip("pydoclint")
    folders = [f"src/trueup/{package}" for package in PLAIN_PACKAGES]
    command = [sys.executable, "-m", "pydoclint.main", "--quiet", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"""Of the rows, the mean."""', "opening"),
        ("far = 1", "name"),
        ('raise ValueError("no method is surer than this one here")', "phrase"),
        ("# " + "word " * 26, "26 words"),
    ],
)
def test_the_scanner_finds_dialect(tmp_path, text, problem):
    file = tmp_path / "module.py"
    file.write_text(f'"""A module."""\n\n{text}\n' if problem != "opening" else f"{text}\n")
    assert [finding.problem for finding in language.scan(file)] == [problem]


def test_the_scanner_accepts_plain_english(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nThe table has one row per method.\n\n```python\nsurer = beside\n```\n")
    assert language.scan(page) == []
    page.write_text("The network is surer beside others.\n")
    assert [finding.problem for finding in language.scan(page)] == ["phrase", "phrase"]
