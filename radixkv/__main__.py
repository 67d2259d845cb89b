"""`python -m radixkv` is the command `radixkv`."""

import sys

from radixkv.cli import main

sys.exit(main())
