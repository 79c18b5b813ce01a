"""``python -m kvxfer``."""

import sys

from kvxfer.cli.main import main

sys.exit(main())
