"""The whole question at once: how calibrated is a network, which method repairs it best, and by how much."""

from trueup.audit.doubts import doubt
from trueup.audit.run import DEFAULT, FAST, FEW_CLASSES, MANY, RECORDING, SLOW, Audit, audit, methods_for
from trueup.audit.titles import RAW, TITLES, title

__all__ = [
    "DEFAULT",
    "FAST",
    "FEW_CLASSES",
    "MANY",
    "RAW",
    "RECORDING",
    "SLOW",
    "TITLES",
    "Audit",
    "audit",
    "doubt",
    "methods_for",
    "title",
]
