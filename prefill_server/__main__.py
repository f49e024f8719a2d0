"""`python -m prefill_server`, `baton-prefill`: read the settings and hand them to the supervisor.

Exit code 2 and one line on stderr if the settings can't be used.
"""

from __future__ import annotations

import sys

from common.errors import ConfigError
from common.runtime import supervisor
from common.runtime.exit_codes import EXIT_CONFIG
from prefill_server.config import parse_args


def main() -> int:
    try:
        config = parse_args(sys.argv[1:])
    except ConfigError as exc:
        sys.stderr.write(f"baton-prefill: {exc}\n")
        return EXIT_CONFIG
    return supervisor.run(config, "prefill_server.scheduler_process")


if __name__ == "__main__":
    sys.exit(main())
