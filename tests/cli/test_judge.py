"""The verb judge: its columns, its JSON, and what it says about wrong input."""

import csv
import json

import numpy as np
import pytest

from trueup.decisions import judge_rate


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.7
    judge = (rng.random(400) < np.where(right, 0.95, 0.3)).astype(float)
    human = np.where(np.arange(400) < 100, right, np.nan)
    rows = (
        (int(j), "" if np.isnan(h) else int(h), i // 4, "ab"[i % 2])
        for i, (j, h) in enumerate(zip(judge, human, strict=True))
    )
    with open("answers.csv", "w", newline="") as out:
        csv.writer(out).writerows([("gpt", "expert", "question", "system"), *rows])
    return judge, human


def test_the_command(file, command):
    words = ["judge", "answers.csv", "--judge", "gpt", "--human", "expert"]
    text = command(*words, "--precision", "0.05").stdout
    assert text.startswith("400 answers, 100 human labels, PPI++\n\n")
    assert "To know the rate to ± 0.05, you need" in text
    result = json.loads(command(*words, "--clusters", "question", "--strata", "system", "--json").stdout)
    assert result["rates"]["clusters"] == 25
    assert [each["stratum"] for each in result["rates"]["strata"]] == ["a", "b"]
    plain = json.loads(command(*words, "--method", "rogan-gladen", "--json").stdout)["rates"]
    assert plain["rate"]["value"] == pytest.approx(judge_rate(*file, method="rogan-gladen").rate.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("answers.csv", "judge"),
        ("answers.csv --judge gpt --human expert --method x", 'must be "ppi" or "rogan-gladen"'),
        ("answers.csv --judge gpt --human expert --precision 2", "precision"),
        ("none.csv", "none.csv"),
    ],
)
def test_the_command_ends_with_2_on_wrong_input(file, command, words, message):
    assert message in command("judge", *words.split(), code=2).stderr
