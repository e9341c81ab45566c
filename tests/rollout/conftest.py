import sys
from pathlib import Path

# The helpers beside the tests: with --import-mode=importlib they are not importable by themselves.
sys.path.insert(0, str(Path(__file__).parent))
