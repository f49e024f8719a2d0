"""`python -m common.worker --config FILE --rank N`: one rank of a server.

Its supervisor starts it. FILE holds a `ServerConfig` as JSON, in the server's private runtime
directory.
"""

from __future__ import annotations

import argparse
import gc
import sys

from common.config import read_config
from common.errors import ConfigError
from common.log import setup_log


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m common.worker", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="JSON file of the server's settings")
    parser.add_argument("--rank", required=True, type=int, help="global rank of this worker")
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config)
        if not 0 <= arguments.rank < config.rank_count:
            raise ConfigError(f"--rank {arguments.rank}: must be in 0..{config.rank_count - 1}")
    except ConfigError as error:
        parser.error(str(error))
    setup_log(config.role, f"worker-{arguments.rank}", config.log_level)
    # While torch is imported, the collector would traverse permanent objects again and again: a
    # fifth of the import's time.
    gc.disable()
    from common.worker.worker import run_worker

    gc.freeze()
    gc.enable()
    return run_worker(config, arguments.rank)


if __name__ == "__main__":
    sys.exit(main())
