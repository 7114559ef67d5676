"""What methods are called where people read of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RAW = "raw"
"""The network as it is, beside its repairs."""

TITLES: Mapping[str, str] = MappingProxyType(
    {
        RAW: "No calibration",
        "identity": "No calibration",
        "temperature": "Temperature scaling",
        "temperature_ece": "Temperature scaling (least ECE)",
        "temperature_ece_wide": "Temperature scaling (least ECE, wide search)",
        "temperature_focal": "Temperature scaling (focal loss)",
        "temperature_brier": "Temperature scaling (Brier score)",
        "vector": "Vector scaling",
        "matrix": "Matrix scaling",
        "ms_odir": "Matrix scaling, ODIR",
        "dirichlet": "Dirichlet calibration",
        "dirichlet_odir": "Dirichlet calibration, ODIR",
        "svs": "Structured vector scaling",
        "sms": "Structured matrix scaling",
        "ets": "Ensemble temperature scaling",
        "platt": "Platt scaling",
        "beta": "Beta calibration",
        "isotonic": "Isotonic regression",
        "isotonic_ovr": "Isotonic regression, one against the rest",
        "isotonic_ovr_ts": "Isotonic regression after temperature",
        "isotonic_pooled": "Isotonic regression, classes pooled",
        "histogram": "Histogram binning",
        "histogram_mass": "Histogram binning, equal mass",
        "histogram_ovr": "Histogram binning, one against the rest",
        "scaling_binning": "Scaling-binning",
        "bbq": "Bayesian binning into quantiles",
        "imax": "I-Max binning",
        "imax_shared": "I-Max binning, classes shared",
        "spline": "Spline calibration",
        "order_invariant": "Order-invariant network",
        "diagonal": "Diagonal map",
        "density_ratio": "Density-ratio calibration",
        "bin_mean_shift": "Bin-mean shift",
        "temperature_histogram": "Temperature scaling, then histogram binning",
        "diagonal_sms": "Diagonal map, then structured matrix scaling",
        "auto": "Automatic choice",
        "clamping": "Neural Clamping",
    }
)
"""Methods by the names that readers know."""


def title(name: str) -> str:
    """A reader's name of a method; names that are not ours stay as they are.

    >>> title("temperature"), title("my own")
    ('Temperature scaling', 'my own')
    """
    return TITLES.get(name, name)
