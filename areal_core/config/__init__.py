"""The configuration machinery: typed fields, YAML with line numbers, overrides, plugin sections, JSON Schema."""
