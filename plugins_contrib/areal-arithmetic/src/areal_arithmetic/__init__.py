"""Templated word problems that a tiny model learns on a CPU: dataset, reward, and a command that makes the model."""
