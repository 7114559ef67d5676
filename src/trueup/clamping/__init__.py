"""Neural Clamping, an input shift and a temperature fitted to a frozen network; and repair under a new camera."""

from trueup.clamping.clamped_file import load_clamped, save_clamped
from trueup.clamping.fit import RECIPES, clamp
from trueup.clamping.fit_record import Clamped, FitRecord
from trueup.clamping.input_repair import Repaired, RepairRecord, repair
from trueup.clamping.maps import Affine, Shift
from trueup.clamping.repair_maps import FAMILIES
from trueup.clamping.repaired_file import load_repaired, save_repaired

__all__ = [
    "FAMILIES",
    "RECIPES",
    "Affine",
    "Clamped",
    "FitRecord",
    "RepairRecord",
    "Repaired",
    "Shift",
    "clamp",
    "load_clamped",
    "load_repaired",
    "repair",
    "save_clamped",
    "save_repaired",
]
