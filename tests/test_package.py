import pkgutil
import subprocess
import sys
from importlib import import_module

import numpy as np
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


NAMES = [
    "evaluate",
    "compare",
    "fit",
    "report",
    "plot_reliability",
    "load",
    "save",
    "Predictions",
    "from_probs",
    "Monitor",
    "calibrate",
    "collect",
    "clamp",
    "repair",
    "adapt",
    "METHODS",
    "METRICS",
    "LOSSES",
]
PACKAGES = [
    "adaptation",
    "calibrators",
    "clamping",
    "cli",
    "convert",
    "decisions",
    "demo",
    "examples",
    "integrations",
    "io",
    "losses",
    "metrics",
    "models",
    "monitor",
    "reports",
    "serve",
]


def test_the_top_level_has_eighteen_names_and_the_packages():
    assert len(NAMES) == 18
    assert sorted(dir(trueup)) == sorted([*NAMES, *PACKAGES, "__version__"])
    for name in trueup.__all__:
        assert getattr(trueup, name) is not None
    with pytest.raises(AttributeError, match="module 'trueup' has no attribute 'nonsense'"):
        _ = trueup.nonsense


def test_packages_are_those_in_the_folder():
    modules = {module.name for module in pkgutil.iter_modules(trueup.__path__)}
    assert {name for name in modules if not name.startswith("_")} == set(PACKAGES)


@pytest.mark.parametrize(
    "package", [name for name in PACKAGES if name not in ("cli", "convert", "demo", "examples", "serve")]
)
def test_every_public_name_of_a_package_resolves(package):
    module = import_module(f"trueup.{package}")
    assert module.__doc__
    assert dir(module) == sorted(module.__all__)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match=rf"module 'trueup.{package}' has no attribute 'nonsense'"):
        _ = module.nonsense


def test_modules_are_reached_from_the_top():
    code = "import trueup; print(trueup.integrations.sklearn.__name__, trueup.metrics.table.__name__)"
    assert run(code).split() == ["trueup.integrations.sklearn", "trueup.metrics.table"]


def test_fit_takes_a_method_by_name_or_as_a_function():
    z, y = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) % 3
    expected = trueup.METHODS["vector"](z, y).config()
    for method in ("vector", trueup.METHODS["vector"]):
        found = trueup.fit(z, y, method).config()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)
    with pytest.raises(KeyError, match="did you mean 'vector'"):
        trueup.fit(z, y, "vektor")


def test_metrics_resolve_to_themselves():
    for name in METRICS:
        assert METRICS[name].__name__ == name
        assert METRICS[name] is getattr(trueup.metrics, name)
    with pytest.raises(KeyError, match="no metric is called 'nonsense'; there are: accuracy"):
        METRICS["nonsense"]
    assert "nonsense" not in METRICS
    assert len(METRICS) == len(list(METRICS))
    assert "metrics: accuracy" in repr(METRICS)


DOORS = """
import sys, trueup.cli.verbs, trueup.convert, trueup.io.load_save, trueup.calibrators.compose, trueup.reports.page
import trueup.decisions.thresholds, trueup.monitor.monitor, trueup.integrations.sklearn
try:
    import fastapi
except ImportError:
    pass
else:
    import trueup.serve.app
print("torch" in sys.modules)
"""


def test_neither_numbers_nor_the_doors_import_torch():
    assert run(DOORS).strip() == "False"
