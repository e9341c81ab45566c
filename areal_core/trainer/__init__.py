"""The training loops: `rl` and `sft`, and what they share."""
