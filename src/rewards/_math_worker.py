"""The process in which math-verify runs: a pair of texts a line in, a verdict a line out.

`_math_pool` starts and kills it, as `python -m rewards._math_worker MEMORY_MB`.
"""

import json
import os
import sys


def serve(memory_mb: int) -> None:
    """Answer until the input ends: "1" equal, "0" not, "?" the reference cannot be read."""
    # Verdicts own the real standard output; what a library prints must not be one.
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from math_verify import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    except (ImportError, ValueError, OSError):
        pass  # not on this system: time alone bounds it

    def read(text: str) -> list[object]:
        targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        found: list[object] = parse(f"\\boxed{{{text}}}", extraction_config=targets, parsing_timeout=None)
        return found

    verdicts.write("ready\n")
    for line in sys.stdin:
        given, reference = json.loads(line)
        try:
            gold = read(reference)
        except Exception:
            gold = []
        try:
            verdict = "?" if not gold else str(int(verify(gold, read(given), timeout_seconds=None)))
        except Exception:
            verdict = "0"
        verdicts.write(verdict + "\n")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
