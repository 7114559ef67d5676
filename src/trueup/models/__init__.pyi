from ._value_module import as_module as as_module
from .calibrated import Calibrated as Calibrated, calibrate as calibrate, collect as collect, outputs as outputs
from .callbacks import EarlyStopping as EarlyStopping, LearnedEpochs as LearnedEpochs
from .corruptions import CORRUPTIONS as CORRUPTIONS, corrupt as corrupt
from .dropout import (
    Moments as Moments,
    insert_dropout as insert_dropout,
    mc_dropout as mc_dropout,
    moments as moments,
    mutual_information as mutual_information,
    predictive_entropy as predictive_entropy,
    probability_variance as probability_variance,
)
from .evaluation import evaluate_loader as evaluate_loader
from .freezing import frozen as frozen
from .networks import Normalise as Normalise, load_weights as load_weights
from .recalibrated import (
    Recalibrated as Recalibrated,
    collect_forecasts as collect_forecasts,
    recalibrate as recalibrate,
)
from .shift import (
    OODRow as OODRow,
    ShiftRow as ShiftRow,
    Shifts as Shifts,
    by_severity as by_severity,
    evaluate_ood as evaluate_ood,
    evaluate_shift as evaluate_shift,
)
from .two_classes import TwoClasses as TwoClasses
