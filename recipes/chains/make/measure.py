"""Runs recipes of this folder one after the other, and puts the scores of all that were run into README.md.

    python recipes/chains/make/measure.py [NAME ...]      # from the repository's root; all of them in three minutes

Importing Olive takes a quarter of a minute, which every recipe would pay in a process of its own.
"""

import json
import sys
from pathlib import Path

from make_recipes import CHAINS, HERE, recipe

README = HERE.parent / "README.md"
SCORES, STEPS = "scores", "steps"
COLUMNS = {
    "size": ("size_on_disk-bytes", lambda value: f"{value / 1e6:.2f} MB"),
    "choice acc_norm": ("quickstart_choice-acc_norm", "{:.3f}".format),
    "generate exact_match": ("quickstart_generate-exact_match", "{:.3f}".format),
    "word perplexity": ("quickstart_perplexity-word_perplexity", "{:.5g}".format),
}


def run_all(names: list[str]) -> list[str]:
    """Runs each recipe; returns a line for each that left no metrics."""
    from olive.workflows import run

    import olive_ext.workflow  # noqa: F401

    failed = []
    for name in names:
        settings = json.loads((HERE.parent / f"{name}.json").read_text())
        metrics(name).unlink(missing_ok=True)
        try:
            run(settings)
        except Exception as error:  # noqa: BLE001  (whatever Olive lets through)
            failed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if not metrics(name).exists():
                failed.append(f"{name}: Olive went on without metrics")
    return failed


def metrics(name: str) -> Path:
    return Path(recipe(name, CHAINS[name])["output_dir"]) / "metrics.json"


def row(name: str) -> str:
    found = json.loads(metrics(name).read_text())
    cells = [form(found[key]["value"]) for key, form in COLUMNS.values()]
    passes = " -> ".join(entry["type"] for entry in CHAINS[name].values() if entry["type"] != "OrtLMEvaluation")
    return f"| [`{name}`]({name}.json) | {passes} | " + " | ".join(cells) + " |"


def table() -> str:
    titles = ["recipe", "passes", *COLUMNS]
    rows = [row(name) for name in CHAINS if metrics(name).exists()]
    return "\n".join([f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *rows])


def put(text: str, mark: str, lines: str) -> str:
    """`text` with `lines` between the two comments that bear `mark`."""
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{lines}\n{end}{after}"


def main() -> None:
    failed = run_all(sys.argv[1:] or list(CHAINS))
    text = put(README.read_text(), SCORES, table())
    steps = metrics("step_by_step").with_name("chain.md")
    if steps.exists():
        text = put(text, STEPS, steps.read_text().partition("\n\n")[2].strip())
    README.write_text(text)
    sys.exit("\n".join(failed) or None)


if __name__ == "__main__":
    main()
