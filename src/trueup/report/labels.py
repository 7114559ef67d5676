"""What metrics are called on an axis, with their units, and which way is better."""

from __future__ import annotations

LABELS = {
    "accuracy": "Accuracy",
    "confidence": "Mean confidence",
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "top_label_brier": "Top-label Brier score",
    "entropy": "Mean entropy (nats)",
    "ece": "ECE",
    "mce": "Maximum calibration error",
    "rmsce": "Root mean square calibration error",
    "ace": "Average calibration error",
    "aece": "Adaptive ECE",
    "sce": "Class-wise calibration error",
    "overconfidence": "Overconfidence",
    "underconfidence": "Underconfidence",
    "temperature": "Temperature",
    "delta_norm": "Norm of the shift δ",
    "loss": "Objective (nats)",
    "smooth_ece": "Smooth ECE",
    "ks": "KS error",
    "aurc": "AURC",
    "eaurc": "Excess AURC",
    "auroc": "AUROC",
    "aupr": "AUPR",
}
_HIGHER = frozenset({"accuracy", "top_k", "auroc", "aupr"})
_NEITHER = frozenset({"confidence", "entropy", "normalised_entropy", "temperature", "delta_norm", "gamma"})


def label(metric: str) -> str:
    """A metric's name for a reader, with its unit where it has one.

    >>> label("nll"), label("thresholded_sce")
    ('NLL (nats)', 'Thresholded sce')
    """
    return LABELS.get(metric, metric.replace("_", " ").capitalize())


def better(metric: str) -> int:
    """1 if more of it is better, −1 if less is, and 0 where that cannot be said.

    >>> better("accuracy"), better("ece"), better("entropy")
    (1, -1, 0)
    """
    return 1 if metric in _HIGHER else 0 if metric in _NEITHER else -1
