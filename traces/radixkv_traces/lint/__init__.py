"""Find the parts of prompts that break caching in a log of requests, and count the tokens that each break costs.

prompts      the text of each part, and the prompts as a cache without limit holds them
linter       the earlier prompts that a request may continue, and the findings
command      `radixkv-replay lint`
"""

from radixkv_traces.lint.linter import Finding, Linter, LintReport, lint

__all__ = ["Finding", "LintReport", "Linter", "lint"]
