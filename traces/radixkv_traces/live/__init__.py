"""A recorded workload, played against an engine that runs: this process's own, or any that speaks OpenAI's HTTP."""
