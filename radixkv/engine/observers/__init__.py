"""What an engine reports of itself: to a monitor, to a trace file."""
