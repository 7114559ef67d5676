"""Live networks: their logits over a loader, calibrated networks, Monte-Carlo dropout, corruptions, small networks."""

from trueup.models.calibrated import Calibrated, collect, on_model, outputs
from trueup.models.corruptions import CORRUPTIONS, corrupt
from trueup.models.dropout import (
    Moments,
    insert_dropout,
    mc_dropout,
    moments,
    mutual_information,
    predictive_entropy,
    probability_variance,
)
from trueup.models.evaluation import evaluate_loader
from trueup.models.freezing import frozen
from trueup.models.networks import Normalise, build_network, load_weights, network_options
from trueup.models.shift import OODRow, ShiftRow, by_severity, evaluate_ood, evaluate_shift
from trueup.models.two_classes import TwoClasses

__all__ = [
    "CORRUPTIONS",
    "Calibrated",
    "Moments",
    "Normalise",
    "OODRow",
    "ShiftRow",
    "TwoClasses",
    "build_network",
    "by_severity",
    "collect",
    "corrupt",
    "evaluate_loader",
    "evaluate_ood",
    "evaluate_shift",
    "frozen",
    "insert_dropout",
    "load_weights",
    "mc_dropout",
    "moments",
    "mutual_information",
    "network_options",
    "on_model",
    "outputs",
    "predictive_entropy",
    "probability_variance",
]
