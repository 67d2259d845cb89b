"""Run lm-evaluation-harness on a local task in a process of its own, and print its results as one JSON line.

    python harness.py FOLDER TASK BACKEND '{"argument": "of the backend"}'

This process needs lm_eval; the one that starts it does not. Its clocks leave out the imports and loading the model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    folder, task, backend, arguments = sys.argv[1:]
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    model = get_model(backend)(**json.loads(arguments))
    computed = count_tokens(model)
    tasks = TaskManager(include_path=folder, include_defaults=False)
    wall, cpu = time.perf_counter(), time.process_time()
    found: Any = lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0, cache_requests=False
    )
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    samples = sorted(found["samples"][task], key=lambda each: each["doc_id"])
    result = {
        "prompts": [each["arguments"][0][0] for each in samples],
        "continuations": [[continuation for _, continuation in each["arguments"]] for each in samples],
        "scores": [[(float(total), bool(greedy)) for total, greedy in each["filtered_resps"]] for each in samples],
        "accuracy": found["results"][task]["acc,none"],
        "computed": computed(),
        "versions": {"lm-eval": lm_eval.__version__},
    }
    print(json.dumps(result | spent))


def count_tokens(model: Any) -> Any:
    """Return a function: the tokens that ran through a model of this process, padding included; None of a server's."""
    if not hasattr(model, "_model_call"):
        return lambda: None
    call, counts = model._model_call, []

    def counted(inputs: Any, *rest: Any, **options: Any) -> Any:
        counts.append(inputs.numel())
        return call(inputs, *rest, **options)

    model._model_call = counted
    return lambda: sum(counts)


if __name__ == "__main__":
    main()
