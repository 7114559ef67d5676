"""MLflow: an evaluator of calibration for `mlflow.models.evaluate`, and models that calibrate."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from trueup._core import __version__
from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY
from trueup.calibrators.base import Calibrator
from trueup.convert import from_log_odds, from_probs, number_labels
from trueup.integrations.tracking import flat_scores, model_card
from trueup.io.load_save import load, save
from trueup.metrics.table import evaluate
from trueup.reports.audit import RAW
from trueup.reports.page import report

try:
    import mlflow
    from mlflow.models.evaluation import EvaluationArtifact, EvaluationResult, ModelEvaluator
except ImportError:
    raise ImportError("trueup.integrations.mlflow needs MLflow: pip install mlflow") from None

__all__ = ["Evaluator", "log_model", "save_model"]

_OPTIONS = {"class_names", "logits", "methods", "metrics", "prefix", "report"}
_CALIBRATOR, _SETTINGS, _INNER = "calibrator.safetensors", "settings.json", "model"


class Evaluator(ModelEvaluator):
    """The evaluator "trueup" of `mlflow.models.evaluate`: metrics with intervals, a report and a calibrator.

    MLflow finds it by an entry point, so nothing is imported: `mlflow.models.evaluate(model, data, targets="y",
    model_type="classifier", evaluators="trueup")`. The predictions are probabilities: an array per row, or the
    probability of class 1. Models with `predict_proba`, such as those of scikit-learn, are asked for probabilities.

    It logs each metric as `calibration/ece`, `calibration/ece_low` and `calibration/ece_high`, and the artifacts
    `calibration/report.html`, `calibration/model_card.md` and `calibration/calibrator.safetensors`. The report compares
    calibrators by cross-fitting; the file holds the chosen one, fitted to the evaluated rows.

    The keys of `evaluator_config` are `metrics`, `methods` (calibrators to try), `report` (False logs metrics only),
    `logits` (True if predictions are logits or log-odds), `class_names` (of the columns) and `prefix`.
    """

    @classmethod
    def can_evaluate(cls, *, model_type: str, evaluator_config: Mapping[str, Any] | None, **kwargs: Any) -> bool:
        """Return whether the model is a classifier and all options are known.

        Parameters
        ----------
        model_type
            The type of the model.
        evaluator_config
            The options.
        **kwargs
            Not used.

        Returns
        -------
        bool
            Whether MLflow calls this evaluator.
        """
        return model_type == "classifier" and set(evaluator_config or ()) <= _OPTIONS

    def evaluate(
        self,
        *,
        dataset: Any,
        run_id: str,
        evaluator_config: Mapping[str, Any] | None,
        model: Any = None,
        **kwargs: Any,
    ) -> EvaluationResult:
        """Score the predictions and log the results.

        Parameters
        ----------
        dataset
            The rows with their labels, and with their predictions if there is no model.
        run_id
            The run to log to.
        evaluator_config
            The options.
        model
            The pyfunc model.
        **kwargs
            Not used.

        Returns
        -------
        mlflow.models.EvaluationResult
            The numbers that were logged, and the artifacts as bytes.
        """
        config = dict(evaluator_config or {})
        output = dataset.predictions_data if model is None else _predict(model, dataset.features_data)
        values = np.asarray(output.tolist() if str(getattr(output, "dtype", "")) == "object" else output)
        if values.dtype.kind != "f":  # all registered evaluators run where none is named, so this is no error
            message = "it scores probabilities, and the model predicts classes; log it with predict_proba"
            warnings.warn(f"the evaluator trueup was skipped: {message}", stacklevel=2)
            return EvaluationResult(metrics={}, artifacts={})
        classes = config.get("class_names", getattr(_raw_model(model), "classes_", None))
        logits = _to_logits(values, bool(config.get("logits")))
        labels = _to_labels(dataset.labels_data, classes, logits.shape[1])
        prefix = config.get("prefix", "calibration/")
        scores = evaluate(logits, labels, metrics=config.get("metrics"))
        numbers = flat_scores(scores, prefix=prefix)
        mlflow.log_metrics(numbers, run_id=run_id)
        with TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "model_card.md").write_text(model_card(scores))
            if config.get("report", True):
                page = report((logits, labels), methods=config.get("methods"), progress=False)
                page.save(folder / "report.html")
                if page.audit.chosen != RAW:
                    names = None if classes is None else [str(each) for each in classes]
                    save(page.audit.calibrators[page.audit.chosen], folder / _CALIBRATOR, class_names=names)
            mlflow.MlflowClient().log_artifacts(run_id, str(folder), "calibration")
            root = mlflow.get_run(run_id).info.artifact_uri
            artifacts = {
                file.name: _Bytes(f"{root}/calibration/{file.name}", file.read_bytes()) for file in folder.iterdir()
            }
        return EvaluationResult(metrics=numbers, artifacts=artifacts)


class _Bytes(EvaluationArtifact):
    """A file as an artifact of MLflow."""

    def _save(self, output_artifact_path: str) -> None:
        Path(output_artifact_path).write_bytes(self.content)

    def _load_content_from_file(self, local_artifact_path: str) -> bytes:
        return Path(local_artifact_path).read_bytes()


def save_model(
    path: str,
    calibrator: Calibrator,
    *,
    model_uri: str | None = None,
    logits: bool = False,
    floor: float | None = None,
    **options: Any,
) -> None:
    """Save a calibrator, or a model with its calibrator, as a pyfunc model of MLflow.

    The input of the model is probabilities, or features if `model_uri` names a model that predicts probabilities. The
    output is calibrated probabilities: (n, classes), or (n,) for the probability of class 1. The folder holds no
    pickled objects of trueup; MLflow loads it through `trueup.integrations.mlflow`.

    Parameters
    ----------
    path
        The folder to write.
    calibrator
        A fitted calibrator.
    model_uri
        Address of a pyfunc model whose predictions to calibrate.
    logits
        The calibrator's input is logits, or log-odds of class 1, instead of probabilities.
    floor
        Replacement of exact zero probabilities: that of the rows of the fit.
    **options
        Options of `mlflow.pyfunc.save_model`, such as `signature`.
    """
    with TemporaryDirectory() as folder:
        options = _write(Path(folder), calibrator, model_uri, {"logits": logits, "floor": floor}) | options
        mlflow.pyfunc.save_model(path, data_path=folder, **options)


def log_model(
    calibrator: Calibrator,
    name: str = "calibrated",
    *,
    model_uri: str | None = None,
    logits: bool = False,
    floor: float | None = None,
    **options: Any,
) -> Any:
    """Log a calibrator, or a model with its calibrator, as a pyfunc model in the active run; see `save_model`.

    Parameters
    ----------
    calibrator
        A fitted calibrator.
    name
        Name of the model.
    model_uri
        Address of a pyfunc model whose predictions to calibrate.
    logits
        The calibrator's input is logits, or log-odds of class 1, instead of probabilities.
    floor
        Replacement of exact zero probabilities: that of the rows of the fit.
    **options
        Options of `mlflow.pyfunc.log_model`, such as `registered_model_name`.

    Returns
    -------
    mlflow.models.model.ModelInfo
        The logged model; `mlflow.pyfunc.load_model(info.model_uri)` reads it.
    """
    with TemporaryDirectory() as folder:
        options = _write(Path(folder), calibrator, model_uri, {"logits": logits, "floor": floor}) | options
        return mlflow.pyfunc.log_model(name=name, data_path=folder, **options)


def _write(folder: Path, calibrator: Calibrator, model_uri: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the data of a model, and return the options of MLflow that belong to it."""
    save(calibrator, folder / _CALIBRATOR)
    (folder / _SETTINGS).write_text(json.dumps(settings))
    requirements = [f"trueup=={__version__}"]
    if model_uri is not None:
        inner = Path(mlflow.artifacts.download_artifacts(model_uri, dst_path=str(folder)))
        if inner != folder / _INNER:
            inner.rename(folder / _INNER)
        listed = folder / _INNER / "requirements.txt"
        requirements += listed.read_text().splitlines() if listed.exists() else []
    return {"loader_module": __name__, "pip_requirements": requirements}


class _CalibratedModel:
    """A loaded model: a calibrator after the predictions of a model, or alone."""

    def __init__(self, path: Path) -> None:
        self.calibrator, self.settings = load(path / _CALIBRATOR), json.loads((path / _SETTINGS).read_text())
        self.inner = mlflow.pyfunc.load_model(str(path / _INNER)) if (path / _INNER).is_dir() else None

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> np.ndarray:
        """Return calibrated probabilities."""
        output = np.asarray(model_input if self.inner is None else _predict(self.inner, model_input))
        if output.dtype.kind != "f":
            raise InputError("the input", "be probabilities or logits", f"dtype {output.dtype}")
        is_event = output.ndim == 1 or output.shape[1] == 1
        logits = _to_logits(output, self.settings["logits"], floor=self.settings["floor"])
        after = NUMPY.softmax(np.asarray(self.calibrator(logits), np.float64), 1)
        return after[:, 1] if is_event else after


def _load_pyfunc(path: str) -> _CalibratedModel:
    """Load a model; MLflow calls this function by its name."""
    return _CalibratedModel(Path(path))


def _raw_model(model: Any) -> Any:
    """Return the model inside a pyfunc model, if it gives it out."""
    try:
        return model.get_raw_model()
    except (AttributeError, NotImplementedError):
        return None


def _predict(model: Any, features: Any) -> Any:
    """Return probabilities of a pyfunc model, by `predict_proba` where the model inside has it."""
    inner = _raw_model(model)
    return inner.predict_proba(features) if hasattr(inner, "predict_proba") else model.predict(features)


def _to_logits(values: np.ndarray, are_logits: bool, floor: float | None = None) -> np.ndarray:
    if not are_logits:
        return from_probs(values.astype(np.float64), floor=floor, renormalise=True, name="predictions")
    return from_log_odds(values.ravel()) if values.ndim == 1 or values.shape[1] == 1 else values


def _to_labels(labels: Any, classes: Any, n_classes: int) -> np.ndarray:
    """Replace names of classes by their numbers."""
    labels = np.asarray(labels)
    if classes is not None:
        return number_labels(labels.astype(str), [str(each) for each in classes])
    if labels.dtype.kind in "OUS":
        names = ", ".join(sorted({str(each) for each in labels})[:5])
        raise InputError("targets", f"be numbers 0..{n_classes - 1}", names, "pass class_names in evaluator_config")
    return labels
