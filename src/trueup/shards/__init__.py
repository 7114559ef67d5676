"""Predictions in many files, on one machine or many: evaluated and calibrated without ever being in memory together."""

from trueup.shards.fits import FITS, Fitted, fit, fit_shards
from trueup.shards.reduce import BadShard, evaluate, gathered
from trueup.shards.source import Shards

__all__ = ["FITS", "BadShard", "Fitted", "Shards", "evaluate", "fit", "fit_shards", "gathered"]
