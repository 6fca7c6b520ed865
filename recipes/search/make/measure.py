"""Runs the search and puts its candidates into README.md.

python recipes/search/make/measure.py      # from the repository's root; a minute
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
README, RECIPE = HERE.parent / "README.md", HERE.parent / "recipe.json"
START, END = "<!-- candidates -->", "<!-- end of candidates -->"
COLUMNS = {
    "size": ("size_on_disk-bytes", lambda value: f"{value / 1e6:.2f} MB"),
    "mean KL": ("all-kl_mean", "{:.5f}".format),
    "same top token": ("all-top1_agreement", "{:.1%}".format),
    "accuracy difference": ("all-accuracy_difference", "{:+.4f}".format),
    "its interval from": ("all-accuracy_difference_low", "{:+.4f}".format),
}


def candidates(recipe: dict) -> list[dict]:
    """The footprint's nodes that were evaluated, the smallest model first."""
    footprint = json.loads((Path(recipe["output_dir"]) / "footprint.json").read_text())
    nodes = [node for node in footprint.values() if node["metrics"] and node["from_pass"]]
    return sorted(nodes, key=lambda node: node["metrics"]["value"]["size_on_disk-bytes"]["value"])


def row(node: dict, names: dict[str, str], picked: dict) -> list[str]:
    values, config = node["metrics"]["value"], node["pass_run_config"]
    cells = [form(values[key]["value"]) for key, form in COLUMNS.values()]
    goals = "yes" if node["metrics"]["if_goals_met"] else "no"
    return [names[node["from_pass"]], str(config["bits"]), str(config["block_size"]), *cells, goals + picked[id(node)]]


def table(recipe: dict) -> str:
    names = {entry["type"].lower(): f"`{entry['type']}`" for entry in recipe["passes"]["quantize"]}
    nodes = candidates(recipe)
    met = [node for node in nodes if node["metrics"]["if_goals_met"]]
    picked = {id(node): ", picked" if met and node is met[0] else "" for node in nodes}
    titles = ["quantizer", "bits", "block", *COLUMNS, "meets the goals"]
    lines = [titles, ["---"] * len(titles), *(row(node, names, picked) for node in nodes)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    from olive.workflows import run

    import olive_ext.workflow  # noqa: F401

    run(str(RECIPE))
    recipe = json.loads(RECIPE.read_text())
    before, _, rest = README.read_text().partition(START)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{START}\n{table(recipe)}\n{END}{after}")


if __name__ == "__main__":
    main()
