"""Pictures and tables of what `simulate` and `run` found."""
