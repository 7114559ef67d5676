import io
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from trueup._core import progress
from trueup._core.progress import track


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def lines(self):
        """What was drawn, one entry a drawing, the clearing ones empty."""
        return self.getvalue().split("\r\x1b[K")[1:]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to go on."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress, "monotonic", lambda: Clock.now)
    return Clock


def attach(monkeypatch, stream):
    """The room's own stderr, for pytest changes that of the process between a fixture and its test."""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    attach(monkeypatch, stream)
    monkeypatch.delenv("TRUEUP_PROGRESS", raising=False)
    return stream


def slowly(clock, seconds, **options):
    for item in track(range(len(seconds)), **options):
        clock.now += seconds[item]
        yield item


def test_the_line_appears_after_two_seconds_and_goes_at_the_end(clock, terminal):
    assert list(slowly(clock, [1.0, 1.5, 1.0], label="collecting")) == [0, 1, 2]
    assert terminal.lines() == ["collecting 2/3  about 1 s left", "collecting 3/3", ""]


def test_what_is_over_in_two_seconds_draws_nothing(clock, terminal):
    assert list(slowly(clock, [0.9, 0.9, 0.19])) == [0, 1, 2]
    assert terminal.getvalue() == ""


def test_it_is_drawn_at_most_ten_times_a_second(clock, terminal):
    list(slowly(clock, [2.0] + [0.01] * 100))
    assert len(terminal.lines()) == 1 + 10 + 1  # at 2.00, in the second that follows, and cleared


def test_a_note_is_asked_for_when_it_is_drawn(clock, terminal):
    asked = []

    def note():
        asked.append(clock.now)
        return f"loss {len(asked)}"

    list(slowly(clock, [0.5, 2.0, 0.01, 0.5], label="fitting", note=note))
    assert terminal.lines() == ["fitting 2/4  loss 1  about 2 s left", "fitting 4/4  loss 2", ""]
    assert len(asked) == 2


def test_without_a_length_it_counts(clock, terminal):
    for item in track(iter("abc"), label="reading"):
        clock.now += 2.0 if item == "a" else 1.0
    assert terminal.lines() == ["reading 1", "reading 2", "reading 3", ""]


def test_a_total_that_is_given_is_believed(clock, terminal):
    for _ in track(iter("ab"), total=9, label="reading"):
        clock.now += 2.0
    assert terminal.lines() == ["reading 1/9  about 16 s left", "reading 2/9  about 14 s left", ""]


def test_a_length_that_is_not_known_is_no_error(clock, terminal):
    class Endless:
        def __len__(self):
            raise TypeError("no length")

        def __iter__(self):
            return iter("a")

    assert list(track(Endless())) == ["a"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_loop_clears_the_line(clock, terminal, error):
    def work():
        for _ in track(range(9), label="work"):
            if clock.now > 103:
                raise error
            clock.now += 2.5

    with pytest.raises(error):
        work()
    assert terminal.lines() == ["work 1/9  about 20 s left", "work 2/9  about 18 s left", ""]


def test_an_exception_in_the_iterable_clears_the_line(clock, terminal):
    def items():
        yield 1
        raise OSError("the disk")

    def work():
        for _ in track(items(), label="read"):
            clock.now += 3

    with pytest.raises(OSError, match="the disk"):
        work()
    assert terminal.lines() == ["read 1", ""]


def test_leaving_the_loop_clears_the_line(clock, terminal):
    for item in track(range(9), label="work"):
        clock.now += 3
        if item == 1:
            break
    assert terminal.lines() == ["work 1/9  about 24 s left", ""]


def test_a_long_line_is_cut_to_the_terminal(clock, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    list(slowly(clock, [3.0], label="x" * 50))
    assert terminal.lines() == ["x" * 19, ""]


def test_nothing_is_drawn_where_nobody_looks(clock, terminal, monkeypatch):
    assert list(slowly(clock, [3.0, 3.0], enabled=False)) == [0, 1]
    assert terminal.getvalue() == ""
    plain = io.StringIO()
    attach(monkeypatch, plain)
    assert list(slowly(clock, [3.0, 3.0])) == [0, 1]
    assert plain.getvalue() == ""
    attach(monkeypatch, None)
    assert list(slowly(clock, [3.0, 3.0])) == [0, 1]


def test_the_environment_can_ask_for_it(clock, monkeypatch):
    plain = io.StringIO()
    attach(monkeypatch, plain)
    monkeypatch.setenv("TRUEUP_PROGRESS", "1")
    list(slowly(clock, [3.0], label="work"))
    assert "work 1/1" in plain.getvalue()


def test_it_needs_no_torch():
    code = "import sys, trueup._core.progress; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False).returncode == 0


def test_a_log_has_a_plain_line_every_ten_seconds_of_a_command(clock, monkeypatch):
    log = io.StringIO()
    attach(monkeypatch, log)
    monkeypatch.delenv("TRUEUP_PROGRESS", raising=False)
    assert list(slowly(clock, [20.0] * 3, label="fitting")) == [0, 1, 2]
    assert log.getvalue() == ""  # a library says nothing
    with progress.log_lines():
        list(slowly(clock, [6.0] * 5, label="fitting"))
        list(slowly(clock, [6.0] * 5, label="silent", enabled=False))
    assert log.getvalue() == "fitting 2/5  about 18 s left\nfitting 4/5  about 6 s left\n"


def test_a_log_has_a_line_now_and_then_while_one_item_takes_long(monkeypatch):
    stream = io.StringIO()
    attach(monkeypatch, stream)
    monkeypatch.setattr(progress, "MAX_SILENT_SECONDS", 0.01)
    with progress.log_lines():
        for item in track([1, 2], label="cells"):
            if item == 2:
                until = time.monotonic() + 60
                while stream.getvalue().count("cells 1/2  still working\n") < 2 and time.monotonic() < until:
                    time.sleep(0.01)
    assert stream.getvalue().count("cells 1/2  still working\n") >= 2
    written = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == written  # nobody writes after the end


def until(drawn):
    """Wait for what a thread does, for as long as a busy machine may need."""
    for _ in range(60_000):
        if drawn():
            return
        time.sleep(0.01)
    raise AssertionError("nothing was drawn in ten minutes")


def test_a_step_without_a_count_tells_how_long_it_takes(terminal, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.01)
    with progress.show_elapsed("reading"):
        until(terminal.getvalue)
    first, *_, last = terminal.lines()
    assert first == "reading  0 s"
    assert last == ""  # and the line is gone


def test_a_step_leaves_the_line_to_a_loop_inside(terminal, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.0)
    with progress.show_elapsed("measuring"):
        for _ in track(range(2), label="fitting"):
            pass
        loop = terminal.lines()
        until(lambda: len(terminal.lines()) > len(loop))
    assert any(line.startswith("fitting 1/2") for line in loop)
    assert terminal.lines()[-1] == ""


def test_a_short_step_draws_nothing_and_an_error_passes(terminal):
    with pytest.raises(OSError, match="the disk"), progress.show_elapsed("reading"):
        raise OSError("the disk")
    assert terminal.getvalue() == ""


def test_a_step_has_plain_lines_in_the_log_of_a_command_alone(monkeypatch):
    log = io.StringIO()
    attach(monkeypatch, log)
    monkeypatch.delenv("TRUEUP_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.01)
    with progress.show_elapsed("reading"):
        time.sleep(0.1)
    assert log.getvalue() == ""  # a library says nothing
    with progress.log_lines(), progress.show_elapsed("reading"):
        until(log.getvalue)
    assert log.getvalue().startswith("reading  0 s\n")
    said = log.getvalue()
    with progress.log_lines(), progress.show_elapsed("silent", enabled=False):
        time.sleep(0.1)
    assert log.getvalue() == said
