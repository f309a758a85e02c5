"""What a run shows: the log file, trackers, console lines, plots and progress bars."""
