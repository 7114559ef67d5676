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
    "calibrators",
    "clamping",
    "cli",
    "decisions",
    "demo",
    "integrations",
    "io",
    "losses",
    "metrics",
    "models",
    "monitor",
    "reports",
    "serve",
]
"""Folders of `src/trueup` that are scanned."""

PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if ROOT / "docs/studies" not in page.parents]
PLAIN_PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples",
    "src/trueup/convert.py",
    "studies/src",
    *(str(page.relative_to(ROOT)) for page in PAGES),
]
"""Pages and other files that are scanned."""

DOCUMENTED = [
    "adaptation",
    "calibrators",
    "clamping",
    "convert",
    "decisions",
    "demo",
    "integrations.lightning",
    "integrations.onnx",
    "integrations.prometheus",
    "integrations.sklearn",
    "integrations.torchmetrics",
    "io",
    "losses",
    "metrics",
    "models",
    "monitor",
    "reports",
]
"""Packages and public modules whose public parameters are all described."""

LIBRARIES = {
    "integrations.prometheus": "prometheus_client",
    "integrations.sklearn": "sklearn",
    "integrations.torchmetrics": "torchmetrics",
}
"""Libraries without which a module cannot be imported."""

ANY_OBJECT = {
    # Any iterable of batches, or inputs of any kind that the network takes.
    "adaptation.adapt(labelled)",
    "adaptation.adapt(loader)",
    "adaptation.adapt(reference)",
    "adaptation.repair(loader)",
    "clamping.clamp(loader)",
    "integrations.sklearn.CalibratedClassifier.fit(X)",
    "losses.training_passes(inputs)",
    "models.calibrate(loader)",
    "models.collect(loader)",
    "models.collect_forecasts(loader)",
    "models.evaluate_loader(loader)",
    "models.mc_dropout(inputs)",
    "models.outputs(loader)",
    "models.recalibrate(loader)",
    # Any object to save or load, or any pair of arrays.
    "io.from_rows(rows)",
    "io.load(model)",
    "io.load(return)",
    "io.load_artifact(model)",
    "io.load_artifact(return)",
    "io.save(obj)",
    "io.save(summary)",
    "io.save_columns(columns)",
    "integrations.onnx.check_export(module)",
    "integrations.onnx.export_table(methods)",
    "metrics.compare(pairs)",
    "models.as_module(value)",
    "models.evaluate_ood(logits)",
    "models.evaluate_ood(ood)",
    "models.evaluate_ood(scores)",
    "models.evaluate_shift(labels)",
    "metrics.compare_forecasts(forecasts)",
    "metrics.paired_bootstrap(first)",
    "metrics.paired_bootstrap(second)",
    "monitor.Monitor.from_settings(settings)",
    "monitor.Monitor(promise)",
    "reports.chart(record)",
    "reports.draw(record)",
    "reports.numbers(record)",
    "reports.summary(record)",
    # Classes of libraries that may be absent, or arguments as scikit-learn has them.
    "integrations.lightning.lightning_callback(return)",
    "integrations.sklearn.CalibratedClassifier(cv)",
    "integrations.sklearn.CalibratedClassifier(estimator)",
    "integrations.sklearn.CalibratedClassifier(method)",
    "integrations.sklearn.CalibratedClassifier(options)",
    "integrations.sklearn.LogitCalibrator(class_names)",
    "integrations.sklearn.LogitCalibrator(method)",
    "integrations.sklearn.LogitCalibrator(options)",
    "integrations.prometheus.prometheus_text(collectors)",
    "integrations.transformers.pipeline(return)",
    "metrics.Scores.plot(ax)",
    "metrics.Scores.plot(return)",
    # The kind of the result depends on the arguments.
    "calibrators.Calibrator.with_choice(choice)",
    "calibrators.cross_fit(return)",
    "convert.as_event(return)",
    "convert.classes_last(logits)",
    "convert.classes_last(return)",
    "convert.flatten(clusters)",
    "convert.flatten(return)",
    "decisions.calibrated_threshold(return)",
    "decisions.threshold(return)",
    "losses.Loss(values)",
    "losses.Loss(weight)",
    "metrics.Tally.of(clusters)",
    "monitor.Monitor.update(clusters)",
    "monitor.Monitor.update(groups)",
}
"""Public parameters and results of type `Any`."""


@pytest.mark.parametrize("package", PLAIN_PACKAGES)
def test_a_package_is_in_plain_english(package):
    assert list(map(str, language.scan_all([ROOT / "src/trueup" / package]))) == []


@pytest.mark.parametrize("page", PLAIN_PAGES)
def test_a_page_is_in_plain_english(page):
    assert list(map(str, language.scan_all([ROOT / page]))) == []


@pytest.mark.parametrize("package", DOCUMENTED)
def test_every_public_parameter_is_described(package):
    pytest.importorskip(LIBRARIES.get(package, "numpy"))
    assert documentation.undocumented(package) == []


@pytest.mark.parametrize("package", DOCUMENTED)
def test_public_signatures_have_precise_types(package):
    pytest.importorskip(LIBRARIES.get(package, "numpy"))
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
