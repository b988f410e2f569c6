"""`python -m rlhf_nb.cli`, as launchers start it."""

import sys

from rlhf_nb.cli import main

sys.exit(main())
