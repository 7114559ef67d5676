"""Verbs that start something: serve, demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trueup.cli import options as o
from trueup.cli.output import print_json, print_stderr

SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Address:
    """Where the server listens, and who may ask."""

    host: str | None = o.option("ADDRESS", "Address to listen on (default 127.0.0.1).")
    port: int | None = o.option("N", "Port (default 8000).", "--port", "-p")
    name: list[str] | None = o.option("NAME", "A host name of this machine for other machines; may be repeated.")
    monitors: Path | None = o.option(
        "FOLDER", "Folder in which monitors survive a restart; without it, they are in memory."
    )
    token: bool = o.switch("Ask for a token also on this machine, where others have accounts.")
    open_browser: bool = o.switch("Open the page in a browser.", "--open")


def serve(*, at: Address, output: Annotated[o.Output, o.only("quiet")]) -> None:
    """Serve a web page: drop a file on it, read the verdict, download the report and the calibrator.

    The page /monitor is for services that send their predictions, and /metrics for Prometheus. Nothing leaves this
    machine, and only this machine can connect unless --host is given; then the address that is printed has a token,
    which the server asks for (TRUEUP_TOKEN sets one). Ctrl-C stops it.

    Examples:
      $ trueup serve
      $ trueup serve --port 9000 --open
      $ trueup serve --monitors watched
    """
    import os
    import secrets

    from trueup.serve.server import run
    from trueup.serve.settings import LOCAL, Settings, is_loopback

    chosen = os.environ.get("TRUEUP_TOKEN")
    token = chosen or (secrets.token_urlsafe(24) if at.token else None)
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ValueError(f"TRUEUP_TOKEN must have at least {SHORTEST_TOKEN} characters, got {len(token)}")
    settings = Settings(monitors_folder=at.monitors, token=token)
    # Who asks for quiet still has to learn a token that is made now.
    made_now = not chosen and (at.token or not is_loopback(at.host or LOCAL[1]))
    shown = made_now or not output.quiet
    on_listening = (lambda address: print_stderr(f"serving {address} until Ctrl-C")) if shown else None
    options = o.set_options(at, "host", "port", "open_browser") | o.drop_unset(hosts=tuple(at.name or ()) or None)
    run(**options, settings=settings, on_listening=on_listening)


def demo(
    folder: Annotated[Path | None, o.output_file("FOLDER", "Folder of the results (default demo).")] = None,
    seed: o.Seed = None,
    *,
    output: o.Output,
) -> None:
    """Train a small network, see that it is overconfident, and calibrate it, in a minute.

    Examples:
      $ trueup demo
      $ trueup demo -o first-look --seed 1
    """
    from trueup.demo import run
    from trueup.io.atomic import require_writable_folder

    if folder is not None:
        require_writable_folder(folder)
    page = run(**o.drop_unset(folder=folder, seed=seed), quiet=output.quiet or output.as_json)
    if output.as_json:
        print_json("demo", output=page)


register = o.commands("Start", serve, demo)
