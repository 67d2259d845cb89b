"""Find the parts of prompts that break caching in a log of requests, and count the tokens that each break costs."""

from radixkv_traces.lint.linter import Finding, Linter, LintReport, lint

__all__ = ["Finding", "LintReport", "Linter", "lint"]
