import subprocess
import sys
from importlib import import_module

import pytest

import trueup
from trueup import METRICS


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_lazy():
    heavy = run(
        "import sys, trueup; trueup.METRICS; list(trueup.METRICS); dir(trueup); "
        "print([m for m in ('torch', 'scipy', 'numpy', 'pandas', 'pyarrow') if m in sys.modules])"
    )
    assert heavy.strip() == "[]"


def test_every_public_name_resolves():
    for name in trueup.__all__:
        assert getattr(trueup, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trueup.nonsense


@pytest.mark.parametrize("package", [*trueup._PACKAGES, "training.data", "report.figures"])
def test_every_public_name_of_a_package_resolves(package):
    module = import_module(f"trueup.{package}")
    assert module.__doc__
    if package == "integrations":  # its modules need libraries of their own
        return
    assert module.__all__
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match=rf"module 'trueup.{package}' has no attribute 'nonsense'"):
        _ = module.nonsense


def test_metrics_resolve_to_themselves():
    for name in METRICS:
        assert METRICS[name].__name__ == name
        assert METRICS[name] is getattr(trueup.metrics, name)
    with pytest.raises(KeyError, match="no metric is called 'nonsense'; there are: accuracy"):
        METRICS["nonsense"]
    assert "nonsense" not in METRICS
    assert len(METRICS) == len(list(METRICS))
    assert "metrics: accuracy" in repr(METRICS)
