from __future__ import annotations

import sys
from pathlib import Path

# fsdp_cases.py is shared with the worker processes, which run it as a plain module.
sys.path.insert(0, str(Path(__file__).parent))
