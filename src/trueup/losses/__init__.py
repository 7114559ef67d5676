"""Losses for training: functions `(logits, labels, *, …) -> (n,)`, each with a Module like torch's own losses."""

from trueup.losses.avuc import AvUC, avuc, entropy_threshold
from trueup.losses.base import Loss
from trueup.losses.brier import Brier, brier
from trueup.losses.clue import CLUE, clue, error_and_entropy, error_and_variance
from trueup.losses.cross_entropy import CrossEntropy, cross_entropy
from trueup.losses.dca import DCA, dca
from trueup.losses.dual_focal import DualFocal, dual_focal
from trueup.losses.entropy_penalty import EntropyPenalty, entropy_penalty
from trueup.losses.focal import FLSD53, Focal, flsd53, focal
from trueup.losses.gaussian import gaussian_nll
from trueup.losses.inverse_focal import InverseFocal, inverse_focal
from trueup.losses.label_smoothing import LabelSmoothing, label_smoothing
from trueup.losses.mixup import Mixed, mixup
from trueup.losses.mmce import MMCE, MMCEWeighted, mmce, mmce_weighted
from trueup.losses.norm import Norm, norm
from trueup.losses.soft_binned import SoftBinnedECE, soft_binned_ece

__all__ = [
    "CLUE",
    "DCA",
    "FLSD53",
    "MMCE",
    "AvUC",
    "Brier",
    "CrossEntropy",
    "DualFocal",
    "EntropyPenalty",
    "Focal",
    "InverseFocal",
    "LabelSmoothing",
    "Loss",
    "MMCEWeighted",
    "Mixed",
    "Norm",
    "SoftBinnedECE",
    "avuc",
    "brier",
    "clue",
    "cross_entropy",
    "dca",
    "dual_focal",
    "entropy_penalty",
    "entropy_threshold",
    "error_and_entropy",
    "error_and_variance",
    "flsd53",
    "focal",
    "gaussian_nll",
    "inverse_focal",
    "label_smoothing",
    "mixup",
    "mmce",
    "mmce_weighted",
    "norm",
    "soft_binned_ece",
]
