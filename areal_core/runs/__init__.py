"""What a run leaves on disk and shows on screen: its directory, metrics, trajectories, progress and report."""
