"""torch for tests of numbers: where it is not installed, its use skips the test, or the file that has it at its top."""

import pytest


class _Missing:
    def __getattr__(self, name):
        pytest.skip("torch is not installed", allow_module_level=True)


try:
    import torch
    from torch import nn
except (ImportError, pytest.skip.Exception):
    torch = nn = _Missing()

__all__ = ["nn", "torch"]
