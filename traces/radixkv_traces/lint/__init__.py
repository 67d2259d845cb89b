"""Find the parts of prompts that break caching in a log of requests, and count the tokens that each break costs.

prompts      the prompts so far, as a cache without limit holds them
linter       the breaks of a prompt, their cost, and the findings of a log
command      `radixkv-replay lint`
"""

from radixkv_traces.lint.linter import Finding, Linter, LintReport, lint

__all__ = ["Finding", "LintReport", "Linter", "lint"]
