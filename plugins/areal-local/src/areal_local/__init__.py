"""areal-local: the embedded inference engine of AReaL."""
