"""Agents: plain objects that play an episode through an OpenAI-compatible client in this process."""
