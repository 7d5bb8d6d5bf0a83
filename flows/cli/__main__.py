"""`python -m flows.cli`: the command r1."""

import sys

from flows.cli.main import main

sys.exit(main())
