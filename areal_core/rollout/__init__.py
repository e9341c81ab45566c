"""Rollout: workflows played against an inference engine, in groups, within a staleness bound."""
