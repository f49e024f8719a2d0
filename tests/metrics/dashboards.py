"""What is in deploy/: every query of the dashboards and every alert's expression."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def queries(path: Path) -> dict[str, str]:
    """Query by panel and number, as Grafana has it: with variables."""
    board = json.loads(path.read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", [])
    }


def alerts() -> dict[str, str]:
    document = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    return {rule["alert"]: rule["expr"] for group in document["groups"] for rule in group["rules"]}
