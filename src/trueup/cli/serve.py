"""Verbs that start something: serve, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, print_stderr

SHORTEST_TOKEN = 16


def serve(
    host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on (default 127.0.0.1).")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", metavar="N", help="Port (default 8000).")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="A host name of this machine for other machines; may be repeated."),
    ] = None,
    monitors: Annotated[
        Path | None,
        typer.Option(
            "--monitors",
            metavar="FOLDER",
            help="Folder in which monitors survive a restart; without it, they are in memory.",
        ),
    ] = None,
    token: Annotated[
        bool,
        typer.Option("--token", help="Ask for a token also on this machine, where others have accounts."),
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    quiet: o.Quiet = False,
) -> None:
    """Serve a web page: drop a file on it, read the verdict, download the report and the calibrator.

    The page /monitor is for services that send their predictions, and /metrics for Prometheus. Nothing leaves this
    machine, and only this machine can connect unless --host is given; then the address that is printed has a token,
    which the server asks for (TRUEUP_TOKEN sets one). Ctrl-C stops it.
    """
    import os
    import secrets

    from trueup.serve.server import run
    from trueup.serve.settings import LOCAL, Settings, is_loopback

    own = os.environ.get("TRUEUP_TOKEN") or (secrets.token_urlsafe(24) if token else None)
    if own is not None and len(own) < SHORTEST_TOKEN:
        raise ValueError(f"TRUEUP_TOKEN must have at least {SHORTEST_TOKEN} characters, got {len(own)}")
    settings = Settings(monitors_folder=monitors, token=own)
    # Who asks for quiet still has to learn a token that is made now.
    made_now = not os.environ.get("TRUEUP_TOKEN") and (token or not is_loopback(host or LOCAL[1]))
    shown = made_now or not quiet
    on_listening = (lambda address: print_stderr(f"serving {address} until Ctrl-C")) if shown else None
    options = o.drop_unset(host=host, port=port, hosts=tuple(name or ()) or None, settings=settings)
    run(**options, open_browser=open_browser, on_listening=on_listening)


def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the results (default demo)."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Random seed (default 0).")] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a small network, see that it is overconfident, and calibrate it, in a minute."""
    from trueup.demo import run
    from trueup.io.atomic import require_writable_folder

    if folder is not None:
        require_writable_folder(folder)
    page = run(**o.drop_unset(folder=folder, seed=seed), quiet=quiet or as_json)
    if as_json:
        print_json("demo", output=page)


def register(app: typer.Typer) -> None:
    """Add the verbs to the application."""
    o.add_command(
        app, serve, "Start", "trueup serve", "trueup serve --port 9000 --open", "trueup serve --monitors watched"
    )
    o.add_command(app, demo, "Start", "trueup demo", "trueup demo -o first-look --seed 1")
