"""How many lines a model family takes: what is declared, without imports, docstrings, comments and blank lines.

python benchmarks/family_lines.py
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
from pathlib import Path

import phalanx.models

FOLDER = Path(phalanx.models.__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    counts = {name: sum(map(declared_lines, files(name))) for name in phalanx.models.FAMILIES}
    for name, count in sorted(counts.items(), key=lambda pair: pair[1]):
        print(f"{name:<14}{count:>5}")
    median = statistics.median(counts.values())
    print(f"{'median':<14}{median:>5g}")
    if args.output is not None:
        args.output.write_text(json.dumps({"lines": counts, "median": median}, indent=1) + "\n")


def files(name: str) -> list[Path]:
    folder = FOLDER / name
    return sorted(folder.glob("*.py")) if folder.is_dir() else [FOLDER / f"{name}.py"]


def declared_lines(file: Path) -> int:
    """Lines of a file that hold code other than imports and docstrings."""
    text = file.read_text()
    tree = ast.parse(text)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in left_out for n, line in lines)


if __name__ == "__main__":
    main()
