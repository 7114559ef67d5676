"""How hard the trials try, and what each of them must say of itself."""

import os

import pytest

KINDS = ("files", "faults", "threads", "numbers")


@pytest.fixture(scope="session")
def effort() -> int:
    """How many times the usual number of examples a trial takes: TRUEUP_EFFORT, or 1."""
    return max(1, int(os.environ.get("TRUEUP_EFFORT", "1")))


@pytest.fixture
def tell(record_property):
    """Say which table the trial belongs to, and what happened in it: `tell("faults", f"{n} saves, all whole")`.

    A trial that was run together with others, before it is asked, tells its own seconds.
    """

    def record(kind, happened, seconds=None):
        assert kind in KINDS, f"a trial is one of {KINDS}, got {kind!r}"
        record_property("kind", kind)
        record_property("happened", happened)
        if seconds is not None:
            record_property("seconds", seconds)

    return record
