"""The evaluator of MLflow and models that calibrate, in a store of files."""

import os
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
from frame_rows import overconfident, softmax

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: make test-integrations")

import pandas as pd  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402

import trueup  # noqa: E402
from trueup import from_probs  # noqa: E402
from trueup.integrations.mlflow import Evaluator, log_model, save_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = np.array(["ant", "bee", "cat"])


@pytest.fixture(scope="module")
def pair():
    pair = overconfident(800, classes=3)
    return pair._replace(logits=pair.logits.astype(np.float64))


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes half a minute to make
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        yield run


def evaluate(model=None, **options):
    options = {"targets": "label", "model_type": "classifier", "evaluators": "trueup"} | options
    return mlflow.models.evaluate(model, **options)


def frame_of(pair):
    return pd.DataFrame({"p": softmax(pair.logits).tolist(), "label": pair.labels})


def test_mlflow_finds_the_evaluator_by_its_entry_point():
    assert "trueup" in mlflow.models.list_evaluators()


def test_metrics_with_intervals_the_report_and_the_calibrator_are_logged(pair, run):
    config = {"methods": ["temperature"], "metrics": ["ece", "nll"]}
    result = evaluate(data=frame_of(pair), predictions="p", evaluator_config=config)
    scores = trueup.evaluate(np.log(softmax(pair.logits)), pair.labels, metrics=["ece", "nll"])
    logged = mlflow.get_run(run.info.run_id).data.metrics
    for metric in ("ece", "nll"):
        expected = [scores[metric].value, scores[metric].low, scores[metric].high]
        names = [f"calibration/{metric}{end}" for end in ("", "_low", "_high")]
        assert [logged[name] for name in names] == [result.metrics[name] for name in names]
        assert [logged[name] for name in names] == pytest.approx(expected, abs=1e-9)
    assert set(result.artifacts) == {"calibrator.safetensors", "model_card.md", "report.html"}
    assert b"<html" in result.artifacts["report.html"].content
    calibrator = trueup.load(urlparse(result.artifacts["calibrator.safetensors"].uri).path)
    assert calibrator.temperature == pytest.approx(trueup.METHODS["temperature"](*pair).temperature, rel=1e-6)
    result.save("saved")
    again = mlflow.models.EvaluationResult.load("saved") if hasattr(mlflow.models, "EvaluationResult") else result
    assert again.artifacts["model_card.md"].content.startswith(b"## Calibration")


def test_events_and_logits(pair):
    happened = (pair.labels == 1).astype(int)
    risk = softmax(pair.logits)[:, 1]
    config = {"report": False, "prefix": "risk_"}
    data = pd.DataFrame({"risk": risk, "score": np.log(risk / (1 - risk)), "label": happened})
    metrics = evaluate(data=data[["risk", "label"]], predictions="risk", evaluator_config=config).metrics
    assert metrics["risk_predicted"] == pytest.approx(risk.mean())
    same = evaluate(
        data=data[["score", "label"]], predictions="score", evaluator_config=config | {"logits": True}
    ).metrics
    assert same == pytest.approx(metrics)


def test_a_model_of_scikit_learn_is_asked_for_probabilities(pair):
    import mlflow.sklearn

    features = pd.DataFrame(pair.logits, columns=["x", "y", "z"])
    classifier = LogisticRegression().fit(features, NAMES[pair.labels])
    mlflow.sklearn.save_model(classifier, "net", serialization_format="cloudpickle", pip_requirements=["scikit-learn"])
    data = features.assign(label=NAMES[pair.labels])
    metrics = evaluate("net", data=data, evaluator_config={"report": False, "metrics": ["nll"]}).metrics
    expected = trueup.metrics.nll(from_probs(classifier.predict_proba(features)), pair.labels)
    assert metrics["calibration/nll"] == pytest.approx(expected, abs=1e-9)

    calibrator = trueup.calibrators.Temperature(2.0)
    save_model("both", calibrator, model_uri="net")
    both = mlflow.pyfunc.load_model("both")
    after = softmax(np.log(classifier.predict_proba(features)) / 2)
    assert both.predict(features) == pytest.approx(after, abs=1e-9)
    assert any(line.startswith("trueup==") for line in Path("both/requirements.txt").read_text().splitlines())
    metrics = evaluate(both, data=features.assign(label=pair.labels), evaluator_config={"report": False}).metrics
    assert metrics["calibration/confidence"] == pytest.approx(after.max(axis=1).mean(), abs=1e-9)


def test_a_calibrator_as_a_model(pair):
    calibrator = trueup.calibrators.Temperature(2.0)
    p = softmax(pair.logits)
    model = mlflow.pyfunc.load_model(log_model(calibrator).model_uri)
    expected = softmax(pair.logits / 2)
    assert model.predict(p) == pytest.approx(expected, abs=1e-12)
    assert model.predict(pd.DataFrame(p, columns=NAMES)) == pytest.approx(expected, abs=1e-12)
    save_model("raw", calibrator, logits=True)
    assert mlflow.pyfunc.load_model("raw").predict(pair.logits) == pytest.approx(expected, abs=1e-12)
    platt = trueup.METHODS["platt"](from_probs(p[:, 1]), (pair.labels == 1).astype(int))
    save_model("event", platt)
    risks = mlflow.pyfunc.load_model("event").predict(p[:, 1])
    assert risks.shape == (800,)
    assert risks == pytest.approx(softmax(platt(from_probs(p[:, 1])))[:, 1], abs=1e-12)


def test_refusals(pair):
    frame = frame_of(pair)
    with pytest.raises(mlflow.exceptions.MlflowException, match="could not be evaluated"):
        evaluate(data=frame, predictions="p", evaluator_config={"typo": 1})
    with pytest.raises(ValueError, match="metrics must be names of METRICS"):
        evaluate(data=frame, predictions="p", evaluator_config={"metrics": ["nope"], "report": False})
    with pytest.raises(ValueError, match="targets must be numbers 0..2, got ant, bee, cat; pass class_names"):
        evaluate(data=frame.assign(label=NAMES[pair.labels]), predictions="p")
    with pytest.warns(UserWarning, match="evaluator trueup was skipped: it scores probabilities"):
        result = evaluate(data=frame.assign(p=pair.labels), predictions="p")
    assert result.metrics == {}
    assert not Evaluator.can_evaluate(model_type="regressor", evaluator_config={})
    save_model("event", trueup.calibrators.Temperature(2.0))
    with pytest.raises(ValueError, match="the input must be probabilities or logits, got dtype int64"):
        mlflow.pyfunc.load_model("event").predict(np.array([1, 0]))
