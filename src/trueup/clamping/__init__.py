"""Neural Clamping: an input shift and a temperature, fitted together to a frozen network."""

from trueup.clamping.clamped_file import load_clamped, save_clamped
from trueup.clamping.fit import RECIPES, clamp
from trueup.clamping.fit_record import Clamped, FitRecord
from trueup.clamping.maps import Affine, Shift

__all__ = ["RECIPES", "Affine", "Clamped", "FitRecord", "Shift", "clamp", "load_clamped", "save_clamped"]
