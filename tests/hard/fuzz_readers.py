"""Readers of files that may be broken, and what must hold of what they read.

Each says whether the file was read. A refusal must be an error of `ALLOWED` that names the file in one line.
"""

import math
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ALARM = 3
"""The code of a monitor that read everything and found calibration lost."""
ALLOWED = (ValueError, FileNotFoundError, PermissionError, ImportError)


def read_pair(path):
    """load, stream and load_logits must agree on whether the file is whole, and on what is in it."""
    import trueup
    from trueup.io import load_logits

    refusals = []
    answers = [
        _read(refusals, path, lambda: trueup.load(path)),
        _read(refusals, path, lambda: _joined(trueup.io.stream(path, rows=7))),
        _read(refusals, path, lambda: (load_logits(path), None)),
    ]
    whole, streamed, alone = answers
    for pair in filter(None, answers):
        z, y = pair
        # An option that a row does not have is -inf, and at least two are there.
        sound = z.ndim == 2 and z.shape[1] >= 2 and (z < np.inf).all() and ((z > -np.inf).sum(axis=1) >= 2).all()
        require(sound, f"logits {z.shape} that are neither finite nor absent options")
        if y is not None:
            require(y.dtype == np.int64 and y.shape == z.shape[:1], f"labels {y.dtype} {y.shape} for logits {z.shape}")
            require(not len(y) or (y.min() >= 0 and y.max() < z.shape[1]), "labels out of range")
    require(whole is None or alone is not None, "load reads it, load_logits does not")
    if whole is not None and streamed is not None:
        same = all(np.array_equal(a, b) for a, b in zip(whole, streamed, strict=True))
        # Rows without a label have logits, and are no pairs.
        require(
            same and (len(whole[0]) < len(alone[0]) or np.array_equal(whole[0], alone[0])),
            "load, stream and load_logits read different numbers",
        )
    require(whole is not None or streamed is None, "stream reads it, load does not")
    require(streamed is not None or whole is None or "Fortran" in refusals[0], "load reads it, stream does not")
    return whole is not None


def _joined(parts):
    parts = list(parts)
    return tuple(np.concatenate([part[i] for part in parts]) for i in range(2))


def _read(refusals, path, read):
    try:
        return read()
    except ALLOWED as error:
        refusals.append(check_message(error, path))
        return None


def check_message(error, path):
    """An error must name the file, in one line that fits a screen."""
    message = str(error)
    require(str(path) in message or path.name in message, f"an error that does not name the file: {message[:200]!r}")
    require("\n" not in message and len(message) < 1500, f"an error of {len(message)} characters: {message[:200]!r}")
    return message


def require(holds, complaint):
    if not holds:
        raise AssertionError(complaint)


def read_or_refuse(path, read):
    """None if the file is refused."""
    return _read([], path, read)


def parameters(found):
    """The numbers of a calibrator, and of those inside it, or of a network."""
    if hasattr(found, "buffers"):
        return [buffer.numpy() for buffer in found.buffers() if buffer.is_floating_point()]
    values = [item for value in found.config().values() for item in (value if isinstance(value, list) else [value])]
    nested = [number for item in values if hasattr(item, "config") for number in parameters(item)]
    return nested + [np.asarray(item) for item in values if isinstance(item, float | np.ndarray)]


def read_calibrator(path):
    from trueup import load
    from trueup.io import read_header

    read_or_refuse(path, lambda: read_header(path))
    found = read_or_refuse(path, lambda: load(path))
    if found is not None:
        require(not any(np.isnan(each).any() for each in parameters(found)), "a calibrator with NaN in it")
        found(np.zeros((2, 3)))
    return found is not None


def read_recalibrator(path):
    from trueup import load
    from trueup.io import read_header

    read_or_refuse(path, lambda: read_header(path, "recalibrator"))
    found = read_or_refuse(path, lambda: load(path))
    if found is not None:
        with np.errstate(all="ignore"):
            ends = found.quantiles([0.0], [1.0], levels=[0.1, 0.5, 0.9])
        require(not np.isnan(ends).any(), "a recalibrator that gives NaN")
    return found is not None


def read_monitor(path):
    from trueup import load

    found = read_or_refuse(path, lambda: load(path))
    if found is not None:
        status = found.update(np.zeros((1, found.n_classes)), [0])
        numbers = {name: value for name, value in vars(status).items() if isinstance(value, float)}
        require(all(math.isfinite(value) for value in numbers.values()), f"a monitor that says {numbers}")
    return found is not None


def read_clamped(path):
    import torch

    from trueup import load

    found = read_or_refuse(path, lambda: load(path, model=torch.nn.Identity()))
    if found is not None:
        require(not any(np.isnan(each).any() for each in parameters(found)), "a clamped network with NaN in it")
        found(torch.zeros(2, 3))
    return found is not None


def read_store(path):
    from trueup_studies.grid import Cell
    from trueup_studies.store import Store

    cells = [Cell("demo", 1, {"seed": seed}) for seed in (0, 7, 99)]

    def read():
        store = Store(path)
        store.statuses(cells), store.outcomes(cells), store.rows(cells), store.known("demo")
        try:
            store.finish(Cell("demo", 1, {"seed": 1000}), [{"ece": 0.5}], seconds=1.0)
        except OSError as error:  # a file may say that its writers must be newer
            require("readonly" in check_message(error, path), str(error))
        return store

    for other in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + other).unlink(missing_ok=True)
    return read_or_refuse(path, read) is not None


def read_shards(path):
    """The bad shard is named, or left out and counted; the good ones lose no row."""
    from trueup.io import Shards
    from trueup.metrics import evaluate_shards

    shards = Shards.of(path.parent)
    options = {"n_resamples": 2, "metrics": ["ece"], "progress": False}
    found = read_or_refuse(path, lambda: evaluate_shards(shards, **options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = evaluate_shards(shards, **options, skip_bad=True) if found is None or found.n_classes == 3 else found
    named = any(f"1 bad shards were left out: {path}" in str(warning.message) for warning in caught)
    require(found is not None or (named and rest.rows == 48), f"{rest.rows} rows of the good shards, warned: {named}")
    return found is not None


def read_upload(path):
    client = _client()
    answer = client.post("/api/upload", params={"name": path.name}, content=path.read_bytes())
    require(answer.status_code in (201, 409, 413), f"status {answer.status_code}: {answer.text[:200]}")
    if answer.status_code != 201:
        message = error_message(answer)
        require(path.name in message or "file is empty" in message, f"does not name the file: {message[:200]!r}")
    else:
        client.delete(f"/api/data/{answer.json()['id']}")
    return answer.status_code == 201


def error_message(answer):
    """What the server says is wrong: one line, and nothing of where it kept the file."""
    message = answer.json()["error"]
    require("\n" not in message and len(message) < 1500, f"{len(message)} characters: {message[:200]!r}")
    require(tempfile.gettempdir() not in message, f"tells where it was kept: {message[:200]!r}")
    return message


def read_replay(path):
    """A log is taken in whole, or nothing of it."""
    client = _client()
    id = client.post("/api/monitors", json={"name": "fuzzed", "n_classes": 3, "block": 10}).json()["id"]
    body = path.read_bytes()
    answer = client.post(f"/api/monitors/{id}/replay", params={"name": path.name, "probs": False}, content=body)
    require(answer.status_code in (200, 409, 413), f"status {answer.status_code}: {answer.text[:200]}")
    status = client.get(f"/api/monitors/{id}").json()["status"]
    client.delete(f"/api/monitors/{id}")
    if answer.status_code != 200:
        message = error_message(answer)
        named = path.name in message or "file is empty" in message or "logits must have 3 classes" in message
        require(named, f"does not name the file: {message[:200]!r}")
        require(status["rows"] == 0, f"{status['rows']} rows of a log that was refused")
    else:
        require(status["rows"] > 0 and status["evidence"] is not None, f"a monitor that says {status}")
    return answer.status_code == 200


def read_restored(path):
    """What is taken for a checkpoint goes on as a monitor does."""
    client = _client()
    answer = client.post("/api/monitors/restore", params={"name": "fuzzed"}, content=path.read_bytes())
    require(answer.status_code in (201, 409), f"status {answer.status_code}: {answer.text[:200]}")
    if answer.status_code == 409:
        error_message(answer)
    else:
        found = answer.json()
        row = {"logits": [[0.0] * found["settings"]["n_classes"]], "labels": [0]}
        after = client.post(f"/api/monitors/{found['id']}/update", json=row)
        client.delete(f"/api/monitors/{found['id']}")
        require(after.status_code == 200, f"it does not go on: {after.text[:200]}")
        rows = after.json()["status"]["rows"]
        require(rows == found["status"]["rows"] + 1, f"{rows} rows after {found['status']['rows']} and one")
    return answer.status_code == 201


_clients = []


def _client():
    if not _clients:
        sys.path.insert(0, str(HERE.parent / "serve"))
        from serving import served

        context = served()
        _clients.append((context.__enter__(), context))
    return _clients[0][0]


def read_cli(path):
    from typer.testing import CliRunner

    from trueup.cli import app

    beside = path.with_name("beside.npz")
    words = {
        "temperature": ["apply", path, beside, "--output", path.with_name("out.npz"), "--quiet"],
        "monitor": ["monitor", beside, "--state", path],
        "packed": ["fit", path, "-m", "temperature", "--output", path.with_name("out.safetensors")],
    }.get(path.stem, ["evaluate", path, "--resamples", "2"])
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exit_code not in (0, ALARM):
        require(result.exit_code == 2, f"code {result.exit_code}: {result.stderr[:300]}")
        lines = [line for line in result.stderr.splitlines() if not line.startswith("trueup: warning:")]
        require(len(lines) == 1 and lines[0].startswith("trueup: "), f"no single line: {result.stderr[:300]!r}")
        # A damaged temperature may be a temperature still, with which logits overflow.
        named = path.name in lines[0] or (path.stem == "temperature" and "logits must be finite" in lines[0])
        require(named and "Traceback" not in result.output, f"said {lines[0][:300]!r}")
    return result.exit_code in (0, ALARM)
