"""What keeps the tests of data sets at home."""

import urllib.error

import pytest

from trueup_studies.training.data import sources


@pytest.fixture
def offline(monkeypatch):
    """No network, and no folder of data but the one given."""

    def refused(url, **options):
        raise urllib.error.URLError("there is no network")

    monkeypatch.setattr(sources, "urlopen", refused)
    monkeypatch.delenv("TRUEUP_DATA", raising=False)
