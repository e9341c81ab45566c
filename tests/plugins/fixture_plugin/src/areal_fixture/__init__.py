"""A plugin for tests; it uses nothing but the public API."""
