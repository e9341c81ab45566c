"""Tools that a model may call: what it writes to call one, and the Python functions that answer."""
