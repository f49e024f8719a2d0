"""A real Prometheus with the rules of deploy/, scraping servers of a test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from demo.servers import free_ports
from tests.e2e.fleet import Node, wait_until
from tests.metrics.dashboards import PROMETHEUS

# The window of a rate, with scrapes this often: several in each.
SCRAPE_INTERVAL = "500ms"
RATE_WINDOW = "30s"
STOP_TIMEOUT_S = 10.0


class Prometheus:
    """Asks one server. Every answer must be a success."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=20.0)

    def is_up(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[object]:
        """The samples that a query finds now."""
        response = self._http.get("/api/v1/query", params={"query": expression})
        assert response.status_code == 200, (expression, response.text)
        found = response.json()["data"]["result"]
        assert isinstance(found, list)
        return found

    def wait_found(self, expression: str, asked_by: str) -> None:
        """Until a query finds something: after a scrape that came too late, nothing is there."""
        what = f"an answer to {asked_by}: {expression}"
        wait_until(what, lambda: self.query(expression) != [], 20.0)

    def rule_health(self) -> dict[str, str]:
        """By alert: ok, unknown while it was not evaluated yet, or err."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def close(self) -> None:
        self._http.close()


@contextmanager
def prometheus(directory: Path, nodes: Sequence[Node]) -> Iterator[Prometheus]:
    """Scrapes `nodes` instead of the targets in deploy/, and more often."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": "500ms"}
    targets = [node.url.removeprefix("http://") for node in nodes]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(PROMETHEUS / "alerts.yml", directory)
    (port,) = free_ports(1)
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             f"--web.listen-address=127.0.0.1:{port}"],
            cwd=directory, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until("Prometheus to be ready", server.is_up, 30.0)
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
