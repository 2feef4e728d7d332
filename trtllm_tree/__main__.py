"""`python -m trtllm_tree` is the command `trtllm-tree`."""

from __future__ import annotations

import sys

from trtllm_tree.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
