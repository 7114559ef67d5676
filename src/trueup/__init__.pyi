from . import (
    adaptation as adaptation,
    calibrators as calibrators,
    clamping as clamping,
    cli as cli,
    convert as convert,
    decisions as decisions,
    demo as demo,
    examples as examples,
    integrations as integrations,
    io as io,
    losses as losses,
    metrics as metrics,
    models as models,
    monitor as monitor,
    reports as reports,
    serve as serve,
)
from ._core import __version__ as __version__
from ._core.registry import LOSSES as LOSSES, METHODS as METHODS, METRICS as METRICS
from .adaptation import adapt as adapt, repair as repair
from .calibrators import fit as fit
from .clamping import clamp as clamp
from .convert import from_probs as from_probs
from .io import Predictions as Predictions, load as load, save as save
from .metrics import compare as compare, evaluate as evaluate
from .models import calibrate as calibrate, collect as collect
from .monitor import Monitor as Monitor
from .reports import plot_reliability as plot_reliability, report as report
