"""Run layers with recurrent state: the arena of their states, their mixers, and a forward of many sequences."""
