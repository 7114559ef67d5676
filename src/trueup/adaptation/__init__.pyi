from ._adapt import AdaptOptions as AdaptOptions, adapt as adapt
from ._repair import repair as repair
from .context import RepairOptions as RepairOptions
from .input_maps import FAMILIES as FAMILIES
from .record import Repaired as Repaired, RepairRecord as RepairRecord
from .report import RepairReport as RepairReport, report_repair as report_repair
