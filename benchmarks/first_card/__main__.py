"""Entry point of ``python -m benchmarks.first_card``, which benchmarks/first_card.sh calls."""

import sys

from benchmarks.first_card.command_line import main

sys.exit(main())
