from ._base import Loss as Loss, per_batch as per_batch, per_sample as per_sample
from ._batch import (
    DCA as DCA,
    MMCE as MMCE,
    AvUC as AvUC,
    MMCEWeighted as MMCEWeighted,
    SoftBinnedECE as SoftBinnedECE,
    avuc as avuc,
    dca as dca,
    entropy_threshold as entropy_threshold,
    mmce as mmce,
    mmce_weighted as mmce_weighted,
    soft_binned_ece as soft_binned_ece,
)
from ._clue import (
    CLUE as CLUE,
    clue as clue,
    error_and_entropy as error_and_entropy,
    error_and_variance as error_and_variance,
    training_passes as training_passes,
)
from ._focal import (
    FLSD53 as FLSD53,
    DualFocal as DualFocal,
    Focal as Focal,
    InverseFocal as InverseFocal,
    dual_focal as dual_focal,
    flsd53 as flsd53,
    focal as focal,
    inverse_focal as inverse_focal,
)
from ._mixup import Mixed as Mixed, mixup as mixup
from ._pointwise import (
    Brier as Brier,
    CrossEntropy as CrossEntropy,
    EntropyPenalty as EntropyPenalty,
    LabelSmoothing as LabelSmoothing,
    Norm as Norm,
    brier as brier,
    cross_entropy as cross_entropy,
    entropy_penalty as entropy_penalty,
    gaussian_nll as gaussian_nll,
    label_smoothing as label_smoothing,
    norm as norm,
)
