#!/usr/bin/env python3
"""`rlmca-cli convert` as a script; see its --help."""

from __future__ import annotations

import sys

from rlmca.cli.convert import convert_command

if __name__ == "__main__":
    sys.exit(convert_command(sys.argv[1:], prog="convert.py"))
