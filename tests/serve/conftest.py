"""One server for all tests that need no settings of their own."""

import pytest
from serving import served


@pytest.fixture(scope="session")
def client():
    with served() as client:
        yield client
