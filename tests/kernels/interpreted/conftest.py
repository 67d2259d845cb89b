"""These tests run Triton's interpreter, which takes over a whole process: `test_interpreted.py` starts one."""

import os

import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

torch.set_num_threads(1)
