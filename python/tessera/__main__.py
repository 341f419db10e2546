"""The command `tessera`, which comes with the package: `python -m tessera doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process with the command."""
    command = Path(__file__).parent / "bin" / "tessera"
    if not command.exists():
        sys.exit(f"tessera: {command} is missing: this package was built without the command")
    os.execv(command, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    main()
