"""trueup with other libraries, each imported only by the module of its name.

- `sklearn`: `LogitCalibrator` and `CalibratedClassifier`, scikit-learn estimators.
- `torchmetrics`: `ECE`, `SCE`, `NLL`, `Brier` and `CalibrationTable`, streaming metrics.
- `lightning`: `lightning_callback`, which logs the calibration of each validation epoch.
- `transformers`: `TrainerMetrics`, a `compute_metrics` for Hugging Face's Trainer.
- `onnx`: which calibrators `torch.export` and ONNX can export, and how far the outputs differ.
- `prometheus`: the metrics of monitors in the text format of Prometheus.
"""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
