"""`python -m tests.docs.notebook` runs docs/notebook.ipynb and stores what its cells print."""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"
ROOT = f"{NOTEBOOK.parents[1]}/"


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = re.sub(r"/tmp/\w+/", "runs/", output["text"]).replace(ROOT, "sdc/")
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
