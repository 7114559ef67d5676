"""A typed client of the server's monitors; it needs only the standard library and NumPy."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

from trueup._core.types import ArrayLike
from trueup.io.atomic import StrPath

__all__ = ["Client", "MonitorInfo", "ServerError"]


class ServerError(RuntimeError):
    """An answer that is an error: the message is the server's.

    Parameters
    ----------
    status
        The HTTP status; 0 if there was no answer.
    message
        One sentence.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class MonitorInfo:
    """A monitor of the server, when it answered."""

    id: str
    """Key of the monitor in each call."""
    name: str
    """Its name, also in Prometheus."""
    settings: dict[str, Any]
    """Arguments of `trueup.Monitor`."""
    status: dict[str, Any]
    """Metrics and evidence: `trueup.monitor.Status` as a dictionary."""
    updated: float | None
    """Time of the latest update in seconds since 1970; None if unknown."""
    saved_rows: int | None
    """Number of rows on the server's disk; None without a folder."""
    problem: str | None
    """Why the monitor could not be written to its folder."""
    refused: int
    """Number of malformed requests for this monitor since the server started."""
    notes: list[str]
    """Warnings about the rows that were sent."""

    @property
    def alarm(self) -> dict[str, Any] | None:
        """The alarm, unless there is none or it was acknowledged."""
        return self.status["alarm"]


class Client:
    """Send predictions to the monitors of `trueup serve`.

    Rows are given as `logits`, `probs` or `confidence`, in the order in which the predictions were made. Requests that
    the server refuses raise a `ServerError` and change nothing.

    Parameters
    ----------
    url
        Address of the server.
    token
        Its token, if it asks for one.
    timeout
        Seconds to wait for an answer.
    proxies
        Use the proxies that the environment names.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", *, token: str | None = None, timeout: float = 60.0,
        proxies: bool = False,
    ) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got {url!r}")
        self._url, self._timeout = url.rstrip("/"), timeout
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._opener = build_opener(*([] if proxies else [ProxyHandler({})]))

    def is_healthy(self) -> bool:
        """Check whether the server answers; it needs no token.

        Returns
        -------
        bool
            False also if there is no answer.
        """
        try:
            return json.loads(self._send("GET", "/healthz")) == {"status": "ok"}
        except (ServerError, ValueError):
            return False

    def monitors(self) -> list[MonitorInfo]:
        """List all monitors.

        Returns
        -------
        list of MonitorInfo
            The monitors, sorted by name.
        """
        return [_info(each) for each in json.loads(self._send("GET", "/api/monitors"))]

    def create(self, name: str, n_classes: int, **settings: Any) -> MonitorInfo:
        """Make a monitor.

        Parameters
        ----------
        name
            A name that no other monitor has.
        n_classes
            Number of classes; 2 for an event or stated confidences.
        **settings
            Further arguments of `trueup.Monitor`, with the sizes as single arguments.

        Returns
        -------
        MonitorInfo
            The new monitor.
        """
        return self._change("", {"name": name, "n_classes": n_classes, **settings})

    def get(self, id: str) -> MonitorInfo:
        """Return a monitor.

        Parameters
        ----------
        id
            Key of the monitor.

        Returns
        -------
        MonitorInfo
            Its status.
        """
        return _info(json.loads(self._send("GET", f"/api/monitors/{quote(id, safe='')}")))

    def update(
        self, id: str, *, logits: ArrayLike | None = None, probs: ArrayLike | None = None,
        labels: ArrayLike | None = None, confidence: ArrayLike | None = None, correct: ArrayLike | None = None,
        awaited: bool = False,
    ) -> MonitorInfo:  # fmt: skip
        """Add predictions with their labels: all rows, or none if they are malformed.

        Parameters
        ----------
        id
            Key of the monitor.
        logits
            Network outputs or log-probabilities, shape (n, n_classes).
        probs
            Probabilities, shape (n, n_classes), or (n,) for class 1 of two.
        labels
            True classes of `logits` or `probs`, shape (n,).
        confidence
            Stated confidences, shape (n,), for a monitor of two classes: wrong and right.
        correct
            Whether each of these answers was right, shape (n,).
        awaited
            Whether the rows were passed to `expect` before.

        Returns
        -------
        MonitorInfo
            The status after these rows.
        """
        rows = {"logits": logits, "probs": probs, "labels": labels, "confidence": confidence, "correct": correct}
        return self._change(id, {**_plain(rows), "awaited": awaited}, "update")

    def expect(
        self, id: str, *, logits: ArrayLike | None = None, probs: ArrayLike | None = None,
        confidence: ArrayLike | None = None,
    ) -> MonitorInfo:  # fmt: skip
        """Add predictions whose labels have not arrived.

        Parameters
        ----------
        id
            Key of the monitor.
        logits
            Network outputs or log-probabilities, shape (n, n_classes).
        probs
            Probabilities, shape (n, n_classes), or (n,) for class 1 of two.
        confidence
            Stated confidences, shape (n,).

        Returns
        -------
        MonitorInfo
            ``status["unlabelled"]`` has the estimates.
        """
        return self._change(id, _plain({"logits": logits, "probs": probs, "confidence": confidence}), "expect")

    def replay(self, id: str, path: StrPath, **options: Any) -> MonitorInfo:
        """Add a log: a file of predictions with labels, oldest row first.

        Parameters
        ----------
        id
            Key of the monitor.
        path
            A file in any format that `trueup.load` reads.
        **options
            Names of the columns, `logits` and `labels`; `probs=True` if they are probabilities.

        Returns
        -------
        MonitorInfo
            The status after these rows.
        """
        texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
        query = urlencode({"name": Path(path).name, **texts})
        return _info(json.loads(self._send("POST", f"{_path(id, 'replay')}?{query}", Path(path).read_bytes())))

    def acknowledge(self, id: str) -> MonitorInfo:
        """Acknowledge the alarm: the evidence begins anew, and the metrics go on.

        Parameters
        ----------
        id
            Key of the monitor.

        Returns
        -------
        MonitorInfo
            ``status["acknowledged"]`` lists the alarms so far.
        """
        return self._change(id, None, "acknowledge")

    def checkpoint(self, id: str) -> bytes:
        """Download a monitor, as a .safetensors file for `trueup.load`.

        Parameters
        ----------
        id
            Key of the monitor.

        Returns
        -------
        bytes
            Content of the file.
        """
        return self._send("GET", _path(id, "file"))

    def delete(self, id: str) -> None:
        """Delete a monitor and its checkpoint.

        Parameters
        ----------
        id
            Key of the monitor.
        """
        self._send("DELETE", _path(id))

    def metrics(self) -> str:
        """Return the metrics of all monitors.

        Returns
        -------
        str
            The text format of Prometheus.
        """
        return self._send("GET", "/metrics").decode()

    def _change(self, id: str, body: dict[str, Any] | None, verb: str = "") -> MonitorInfo:
        content = b"" if body is None else json.dumps(body, allow_nan=False).encode()
        return _info(json.loads(self._send("POST", _path(id, verb), content, "application/json")))

    def _send(self, method: str, path: str, body: bytes | None = None, kind: str = "application/octet-stream") -> bytes:
        headers = self._headers | ({} if body is None else {"Content-Type": kind})
        request = Request(self._url + path, body, headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                content: bytes = answer.read()
                return content
        except HTTPError as error:
            with error:
                raise ServerError(error.code, _message(error.read())) from None
        except (URLError, TimeoutError) as error:
            raise ServerError(0, f"{self._url} does not answer: {getattr(error, 'reason', error)}") from None


def _path(*parts: str) -> str:
    return "/".join(["/api/monitors", *(quote(part, safe="") for part in parts if part)])


def _plain(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays that were given as lists; an absent option, −∞ or NaN, becomes null."""
    return {name: _lists(np.asarray(values)) for name, values in rows.items() if values is not None}


def _lists(values: np.ndarray) -> list[Any]:
    if values.dtype.kind != "f":
        return values.tolist()
    if np.isposinf(values).any() or (values.ndim == 1 and not np.isfinite(values).all()):
        raise ValueError("the rows must be finite")
    absent: Any = None
    rows: list[Any] = np.where(np.isfinite(values), values, absent).tolist()
    return rows


def _info(answer: dict[str, Any]) -> MonitorInfo:
    """Read an answer; entries of a newer server are left out."""
    return MonitorInfo(**{each.name: answer[each.name] for each in fields(MonitorInfo)})


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return "the answer is not from trueup"
