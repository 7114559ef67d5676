"""methods, metrics and losses."""

import pytest

from trueup import LOSSES, METHODS, METRICS

LISTS = {"methods": METHODS, "metrics": METRICS, "losses": LOSSES}


@pytest.mark.parametrize("verb", LISTS)
def test_every_name_has_a_line_that_says_what_it_is(command, asked, verb):
    lines = command(verb).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *LISTS[verb]]
    entries = asked(verb)[verb]
    assert list(entries) == list(LISTS[verb])
    for name, entry in entries.items():
        assert set(entry) == {"summary", "defaults"}
        assert len(entry["summary"]) > 15, name
        assert entry["summary"].endswith((".", "?")), (name, entry["summary"])
        assert "as a Module" not in entry["summary"]


def test_defaults_are_those_of_the_signatures(asked, command):
    assert asked("metrics")["metrics"]["ece"]["defaults"]["bins"] == 15
    assert asked("losses")["losses"]["focal"]["defaults"] == {"gamma": 3.0, "detach_weight": False}
    assert asked("methods")["methods"]["temperature"]["defaults"] == {"smooth": 0.0}
    line = next(line for line in command("methods").stdout.splitlines() if line.startswith("temperature_ece "))
    assert "bins=15" in line


def test_sentences_are_whole(asked):
    found = asked("methods")["methods"]
    assert found["temperature"]["summary"] == "Divide the logits by one number: q = softmax(z/T)."
    assert found["temperature_ece_wide"]["summary"].startswith(
        "Divide the logits by one number: q = softmax(z/T). Take"
    )
