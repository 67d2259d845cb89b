"""The version of the distribution, for whoever must not import more than that. Knows nothing else."""

__version__ = "0.1.0"
