"""Settings and data shared by all tests: of the library, of the studies, and of the examples in docstrings."""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# A shell that starts the tests in the background makes them deaf to Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads that wait for each other over small tensors cost more than they bring, here and in child processes. What
# depends on their number is tested by name (test_determinism, test_threads). It must be set before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class _SkipWithoutTorch:
    """Where torch is not installed, whatever imports it is skipped: a test, or a file that does so at its top."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            pytest.skip("torch is not installed", allow_module_level=True)


if find_spec("torch") is None:
    sys.meta_path.insert(0, _SkipWithoutTorch)

DEMO = Path(__file__).parent / "src/trueup/demo/predictions.npz"

settings.register_profile("trueup", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("trueup")


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder of real data sets, named by TRUEUP_DATA."""
    folder = os.environ.get("TRUEUP_DATA")
    if not folder:
        pytest.skip("TRUEUP_DATA is not set: the real data sets are not at hand")
    return Path(folder)


@pytest.fixture(autouse=True)
def _readme_folder(request, monkeypatch):
    """Run the examples of the README and the first tutorial where `trueup demo` has left its predictions."""
    if Path(request.node.path).name in ("README.md", "images.md"):
        folder = request.getfixturevalue("tmp_path")
        monkeypatch.chdir(folder)
        from trueup import load, save

        for split in ("val", "test"):
            Path("demo").mkdir(exist_ok=True)
            save(load(DEMO, split=split), f"demo/{split}.npz")
