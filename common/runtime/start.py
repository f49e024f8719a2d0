"""Settings and log of a scheduler or worker process at its start."""

from __future__ import annotations

import argparse

from common.config import ServerConfig, read_config
from common.log import setup_log


def read_process_config(process: str) -> ServerConfig:
    """The settings named by `--config FILE`, with this process's log set up."""
    parser = argparse.ArgumentParser(prog=f"baton-{process}")
    parser.add_argument("--config", required=True, help="JSON settings, written by the supervisor")
    config = read_config(parser.parse_args().config)
    setup_log(config.role, process, config.log_level)
    return config
