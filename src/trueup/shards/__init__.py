"""Predictions in many files, on one machine or many: evaluated and calibrated without ever being in memory together."""

from trueup.shards.fits import FITS, fit
from trueup.shards.reduce import BadShard, evaluate, gathered
from trueup.shards.source import Shards

__all__ = ["FITS", "BadShard", "Shards", "evaluate", "fit", "gathered"]
