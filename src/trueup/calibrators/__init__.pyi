from ._registries import FORECAST_METHODS as FORECAST_METHODS, METHODS as METHODS
from .base import Calibrator as Calibrator, Identity as Identity, TopLabel as TopLabel
from .binning import (
    BBQ as BBQ,
    Histogram as Histogram,
    HistogramOvR as HistogramOvR,
    IMax as IMax,
    IMaxShared as IMaxShared,
    ScalingBinning as ScalingBinning,
    ShrunkenHistogram as ShrunkenHistogram,
)
from .compose import (
    Chain as Chain,
    OneEvent as OneEvent,
    OneVsRest as OneVsRest,
    chain as chain,
    choose as choose,
    cross_fit as cross_fit,
    fit as fit,
    for_event as for_event,
    grid as grid,
    one_vs_rest as one_vs_rest,
    refinement as refinement,
)
from .diagonal import Diagonal as Diagonal
from .ets import EnsembleTemperature as EnsembleTemperature
from .forecasts import (
    IsotonicQuantiles as IsotonicQuantiles,
    Recalibrator as Recalibrator,
    VarianceScaling as VarianceScaling,
)
from .groupwise import (
    PerGroup as PerGroup,
    PerLabel as PerLabel,
    per_group as per_group,
    per_label as per_label,
)
from .isotonic import (
    Isotonic as Isotonic,
    IsotonicOvR as IsotonicOvR,
    IsotonicPooled as IsotonicPooled,
    VennAbers as VennAbers,
)
from .linear import (
    Dirichlet as Dirichlet,
    Linear as Linear,
    Matrix as Matrix,
    Structured as Structured,
    Vector as Vector,
)
from .logistic import Beta as Beta, Platt as Platt, Quadratic as Quadratic
from .low_rank import LowRank as LowRank
from .neural import OrderInvariant as OrderInvariant, Residual as Residual
from .pool import Mixture as Mixture, UniformMixture as UniformMixture
from .prompt_bias import (
    average_orders as average_orders,
    contextual_bias as contextual_bias,
    position_bias as position_bias,
)
from .proximity_aware import BinMeanShift as BinMeanShift, DensityRatio as DensityRatio
from .sharded import fit_shards as fit_shards
from .spline import SmoothingSpline as SmoothingSpline, Spline as Spline
from .temperature import Temperature as Temperature
