from .clamped import Clamped as Clamped, FitRecord as FitRecord
from .fit import RECIPES as RECIPES, clamp as clamp
from .maps import Affine as Affine, Shift as Shift
from .problem import MapOptions as MapOptions, Objective as Objective
