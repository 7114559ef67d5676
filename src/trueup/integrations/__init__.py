"""Connections to other libraries; each is imported only by the module that carries its name.

- `sklearn`: `LogitCalibrator` and `CalibratedClassifier`, scikit-learn estimators.
- `torchmetrics`: `ECE`, `SCE`, `NLL`, `Brier` and `CalibrationTable`, streaming metrics.
- `lightning`: `lightning_callback`, which logs the calibration of each validation epoch.
- `transformers`: `TrainerMetrics`, a `compute_metrics` for Hugging Face's Trainer.
- `onnx`: export of forecast recalibrators, and checks that `torch.export` and ONNX give the same outputs.
- `boosting`: raw scores of XGBoost, LightGBM and scikit-learn as logits, without class weights.
- `spark` and `ray`: data frames as shards, and calibrated columns.
- `mlflow`: an evaluator of `mlflow.models.evaluate`, and models that calibrate.
- `tracking`: numbers for Weights & Biases and other trackers, and a section of a model card.
- `evaluate`: `Calibration`, a metric for Hugging Face's `evaluate`.
- `lm_eval`: metrics of multiple-choice tasks for lm-evaluation-harness.
- `prometheus`: the metrics of monitors in the text format of Prometheus.
"""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
