"""Verbs that start something: serve, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueup.cli import options as o
from trueup.cli.errors import print_stderr
from trueup.cli.output import print_json

RUN = "trueup.serve.server:run"
DEMO = "trueup.demo:run"


def serve(
    host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help=o.help_of("Where to listen", RUN, "host"))
    ] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", metavar="N", help=o.help_of("Port", RUN, "port"))] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="A name under which others reach this machine; may be repeated."),
    ] = None,
    monitors: Annotated[
        Path | None,
        typer.Option("--monitors", metavar="FOLDER", help="Keep monitors there over a restart; else in memory alone."),
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    quiet: o.Quiet = False,
) -> None:
    """Open the web page: drop a file on it, see the verdict, take the report and the calibrator home.

    Its page /monitor watches services that send their predictions, and /metrics tells Prometheus. Nothing leaves this
    machine, and unless --host says otherwise nobody else can connect. Ctrl-C ends it.
    """
    from trueup.serve.server import run
    from trueup.serve.settings import Settings

    settings = Settings(monitors_folder=monitors) if monitors else None
    told = None if quiet else lambda address: print_stderr(f"serving {address} until Ctrl-C")
    wanted = o.given(host=host, port=port, hosts=tuple(name or ()) or None, settings=settings)
    run(**wanted, open_browser=browse, on_listening=told)


def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help=o.help_of("Where the results go", DEMO, "folder")),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help=o.help_of("Seed", DEMO, "seed"))] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a small network, see that it is overconfident, and repair it: all that trueup does, in a minute."""
    from trueup.demo import run
    from trueup.io.atomic import require_writable_folder

    if folder is not None:
        require_writable_folder(folder)
    page = run(**o.given(folder=folder, seed=seed), quiet=quiet or as_json)
    if as_json:
        print_json("demo", output=page)


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(
        rich_help_panel="Start",
        epilog=o.examples("trueup serve", "trueup serve --port 9000 --open", "trueup serve --monitors watched"),
    )(serve)
    app.command(rich_help_panel="Start", epilog=o.examples("trueup demo", "trueup demo -o first-look --seed 1"))(demo)
