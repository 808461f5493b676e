"""What is promised of every notebook: short cells, one H1, a badge, no outputs, no name that does not exist."""

import ast
import importlib
import importlib.util
import inspect
import re

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import colab_kit as kit
from colab_kit import notebooks
from colab_kit.preflight import Preflight

FILES = sorted((notebooks.ROOT / "notebooks").glob("*.ipynb"))
COLAB = {
    "quickstart.ipynb": "T4",
    "standby_benchmark.ipynb": "T4",
    "llama31_8b_qlora_t4.ipynb": "T4",
    "qwen3_32b_qlora_a100.ipynb": "A100",
}


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request):
    return request.param


@pytest.fixture
def notebook(file):
    return nbformat.read(file, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def plain(source: str) -> str:
    """A cell's Python, with its magics as the calls that IPython makes of them."""
    return TransformerManager().transform_cell(source)


def test_it_is_a_valid_notebook(notebook, file):
    nbformat.validate(nbformat.read(file, as_version=nbformat.NO_CONVERT))
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_it_holds_no_outputs_and_no_widgets(notebook):
    assert "widgets" not in notebook.metadata
    for cell in code_cells(notebook):
        assert not cell.outputs and cell.execution_count is None
        assert not set(cell.metadata) - {"cellView", "id", "tags", "jupyter"}


def test_cells_are_short_and_explained_first(notebook):
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= 15, cell.source
    assert notebook.cells[0].cell_type == "markdown"
    for before, cell in zip(notebook.cells, notebook.cells[1:], strict=False):
        assert cell.cell_type != "code" or before.source.strip(), "a code cell after an empty one"


def test_it_has_one_title_and_short_headings(notebook):
    headings = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            headings += re.findall(r"^(#+) (.+)$", prose, re.MULTILINE)
    assert [level for level, _ in headings].count("#") == 1 and headings[0][0] == "#"
    assert all(level in ("#", "##") for level, _ in headings)
    assert all(len(text) <= 40 for level, text in headings if level == "##")
    assert len(headings) > 5


def test_badge_metadata_and_install_cell_lead_to_the_repository(notebook, file):
    metadata = notebook.metadata
    assert metadata.accelerator == "GPU"
    assert metadata.colab.gpuType == COLAB.get(file.name, metadata.colab.gpuType) and metadata.colab.gpuType
    assert metadata.kernelspec.name == "python3"
    repo = notebooks.repository()
    assert notebooks.badge(file.name, repo) in notebook.cells[0].source
    assert not notebooks.disagreeing()
    if file.name in COLAB:
        install = code_cells(notebook)[0]
        assert install.metadata.jupyter.source_hidden  # folded in JupyterLab; cellView folds it in Colab
        assert install.metadata.cellView == "form" and install.source.startswith("# @title Install")
        assert f"git+https://github.com/{repo}" in install.source


def test_the_settings_are_one_form(notebook, file):
    forms = [cell for cell in code_cells(notebook) if "# @param" in cell.source]
    assert len(forms) == 1, "one cell to edit"
    for line in forms[0].source.splitlines():
        if "# @param" in line:
            assert re.fullmatch(r"\w+ = .+  # @param (\{.+\}|\[.+\](?: \{.+\})?)", line), line


def test_every_cell_parses(notebook):
    for cell in code_cells(notebook):
        ast.parse(plain(cell.source))


def used_names(notebook) -> set[str]:
    """Dotted names under the kit: `kit.presets.for_ci`, and what is imported from its modules."""
    used = set()
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(plain(cell.source))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "colab_kit":
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                name = dotted(node)
                if name and name.split(".")[0] == "kit":
                    used.add("colab_kit" + name[3:])
    return used


def dotted(node) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner else None


def test_every_public_name_exists(notebook):
    missing = []
    for name in sorted(used_names(notebook)):
        thing = kit
        for part in name.split(".")[1:]:
            thing = getattr(thing, part, None)
        if thing is None:
            module, _, attribute = name.rpartition(".")
            if importlib.util.find_spec(module) is None or not hasattr(importlib.import_module(module), attribute):
                missing.append(name)
    assert not missing


METHODS = {"policy": kit.Policy, "run": kit.Run, "machine": Preflight}


def test_every_method_used_exists(notebook):
    missing = []
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(plain(cell.source))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in METHODS:
                owner = METHODS[node.value.id]
                if not hasattr(owner, node.attr) and f"self.{node.attr}" not in inspect.getsource(owner.__init__):
                    missing.append(f"{node.value.id}.{node.attr}")
    assert not missing


def test_every_setting_used_exists(notebook):
    names = set(kit.Settings.__dataclass_fields__)
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(plain(cell.source))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
                assert {keyword.arg for keyword in node.keywords} <= names


def test_one_command_sets_the_repository_everywhere(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for file in [notebooks.ROOT / "pyproject.toml", *FILES]:
        (tmp_path / file.relative_to(notebooks.ROOT)).write_text(file.read_text())
    old = notebooks.repository(tmp_path)
    changed = notebooks.set_repository("someone/their.kit-2", tmp_path)
    assert {file.name for file in changed} == {"pyproject.toml", *(file.name for file in FILES)}
    assert notebooks.repository(tmp_path) == "someone/their.kit-2" and not notebooks.disagreeing(tmp_path)
    for file in changed:
        assert old not in file.read_text()
        if file.suffix == ".ipynb":
            nbformat.validate(nbformat.read(file, as_version=4))
    notebooks.set_repository(old, tmp_path)
    for file in changed:
        assert file.read_text() == (notebooks.ROOT / file.relative_to(tmp_path)).read_text()


@pytest.mark.parametrize("wrong", ["justaname", "https://github.com/a/b", "a/b/c", "a b/c"])
def test_a_repository_is_an_owner_and_a_name(wrong, tmp_path):
    with pytest.raises(ValueError, match="OWNER/NAME"):
        notebooks.set_repository(wrong, tmp_path)
