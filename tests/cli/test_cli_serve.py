"""serve and demo: that they start what they should, with what was asked for."""

import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def started(monkeypatch):
    """What was started, and with what."""
    calls = []

    def put(name, run):
        room = ModuleType(name)
        room.run = run
        monkeypatch.setitem(sys.modules, name, room)

    tokens = []

    def serve(host="127.0.0.1", port=8000, *, hosts=(), settings, require_token, open_browser=False, on_listening):
        calls.append((host, port, hosts, open_browser))
        tokens.append((settings.token, require_token))
        on_listening(f"http://{host}:{port}/" + ("?token=new" if require_token or settings.token else ""))

    def demo(folder="demo", *, seed=0, quiet=False):
        calls.append((folder, seed, quiet))
        return Path(folder) / "report.html"

    serve.tokens = tokens
    put("trueup.serve.server", serve)
    put("trueup.demo", demo)
    return calls


def test_serve(command, started):
    assert command("serve").stderr == "trueup: serving http://127.0.0.1:8000/?token=new until Ctrl-C\n"
    command("serve", "--host", "0.0.0.0", "-p", 9000, "--name", "lab", "--name", "lab.local", "--open", "-q")
    assert started == [("127.0.0.1", 8000, (), False), ("0.0.0.0", 9000, ("lab", "lab.local"), True)]


def test_demo(command, asked, started):
    command("demo")
    assert asked("demo", "-o", "first", "--seed", 3)["output"] == "first/report.html"
    command("demo", "--quiet")
    assert started == [("demo", 0, False), (Path("first"), 3, True), ("demo", 0, True)]


def test_a_token_is_required_by_default_and_a_new_one_is_shown_even_in_quiet(command, started, monkeypatch):
    tokens = sys.modules["trueup.serve.server"].run.tokens
    monkeypatch.delenv("TRUEUP_TOKEN", raising=False)
    assert "serving" in command("serve", "-q").stderr
    assert command("serve", "--no-token", "-q").stderr == ""
    monkeypatch.setenv("TRUEUP_TOKEN", "a-secret-of-my-own")
    assert command("serve", "-q").stderr == ""
    assert tokens == [(None, True), (None, False), ("a-secret-of-my-own", True)]
    monkeypatch.setenv("TRUEUP_TOKEN", "short")
    assert "TRUEUP_TOKEN must have at least 16 characters, got 5" in command("serve", code=2).stderr
