"""Verbs that start a server or a demo: serve, demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trueup.cli import options as o
from trueup.cli.output import print_json, print_stderr

if TYPE_CHECKING:
    from trueup.serve.settings import ServedNetwork

MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True)
class Address:
    """Address of the server, and who may connect."""

    host: str | None = o.option("ADDRESS", "Address to listen on (default 127.0.0.1).")
    port: int | None = o.option("N", "Port (default 8000).", "--port", "-p")
    name: list[str] | None = o.option("NAME", "A host name by which other machines reach this one; may be repeated.")
    monitors: Path | None = o.option("FOLDER", "Folder that keeps monitors over a restart (default: only in memory).")
    no_token: bool = o.switch("Require no token, on a machine that only you use.", "--no-token")
    open_browser: bool = o.switch("Open the page in a browser.", "--open")


@dataclass(frozen=True)
class Clampable:
    """A network that the page can clamp."""

    network: str | None = o.option("MODEL", "package.module:make_model of a network that the page can clamp.")
    network_data: str | None = o.option("FILE|FOLDER", "Its labelled images, as for `trueup clamp`.")
    network_weights: Path | None = o.option("FILE", "Its weights, .safetensors or .pt.")

    def served(self) -> ServedNetwork | None:
        """Return the network with its data, which are loaded once they are needed."""
        from trueup.cli.networks import NetworkData
        from trueup.serve.settings import ServedNetwork

        if self.network is None:
            if self.network_data or self.network_weights:
                raise ValueError("--network-data and --network-weights need --network")
            return None
        if self.network_data is None:
            raise ValueError("--network needs --network-data, its labelled images")
        source = NetworkData(self.network, self.network_data, self.network_weights, 128, None, None, None)

        def load() -> tuple[Any, tuple[Any, Any]]:
            network, (val, test), _ = source.load()
            return network, (val, test)

        return ServedNetwork(f"{self.network}, {Path(self.network_data).name}", load)


def serve(*, at: Address, clampable: Clampable, output: Annotated[o.Output, o.only("quiet")]) -> None:
    """Serve a web page: drop a file on it, read the verdict, download the report and the calibrator.

    The page /monitor is for services that send their predictions, and /metrics for Prometheus. No data leaves this
    machine. Without --host only this machine can connect. The server requires a token, which is part of the printed
    address (TRUEUP_TOKEN sets one). Ctrl-C stops the server.

      $ trueup serve
      $ trueup serve --port 9000 --open
      $ trueup serve --monitors watched
      $ trueup serve --network mymodels:resnet --network-weights resnet.safetensors --network-data images.npz
    """
    import os

    from trueup.serve.server import run
    from trueup.serve.settings import Settings

    token = os.environ.get("TRUEUP_TOKEN") or None
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(f"TRUEUP_TOKEN must have at least {MIN_TOKEN_LENGTH} characters, got {len(token)}")
    settings = Settings(monitors_folder=at.monitors, token=token, network=clampable.served())

    def show(address: str) -> None:
        # A new token must be printed even with --quiet, or nobody could connect.
        if not output.quiet or (token is None and "token=" in address):
            print_stderr(f"serving {address} until Ctrl-C")

    options = o.set_options(at, "host", "port", "open_browser") | o.drop_unset(hosts=tuple(at.name or ()) or None)
    run(**options, settings=settings, require_token=not at.no_token, on_listening=show)


def demo(
    folder: Annotated[Path | None, o.output_file("FOLDER", "Folder of the results (default demo).")] = None,
    seed: o.Seed = None,
    *,
    output: o.Output,
) -> None:
    """Train a small network, show that it is overconfident, and calibrate it, in a minute.

    $ trueup demo
    $ trueup demo -o first-look --seed 1
    """
    from trueup.demo import run

    page = run(**o.drop_unset(folder=folder, seed=seed), quiet=output.quiet or output.as_json)
    if output.as_json:
        print_json("demo", output=page)


register = o.commands("Start", serve, demo)
