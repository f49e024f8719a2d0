"""`python -m decode_server`, `baton-decode`: read the settings and hand them to the supervisor.

Exit code 2 and one line on stderr if the settings can't be used, 75 if they can't be used now.
"""

from __future__ import annotations

import sys

from common.errors import ConfigError
from common.exit_codes import exit_code_of
from common.runtime import supervisor
from decode_server.config import parse_args


def main() -> int:
    try:
        config = parse_args(sys.argv[1:])
    except ConfigError as exc:
        sys.stderr.write(f"baton-decode: {exc}\n")
        return exit_code_of(exc)
    return supervisor.run(config)


if __name__ == "__main__":
    sys.exit(main())
