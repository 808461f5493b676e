"""`make demo`: the quickstart in a terminal."""

import nbformat

from colab_kit import demo


def test_what_cells_print_appears_and_results_can_be_read_back(tmp_path, capfd):
    cells = [nbformat.v4.new_code_cell(source) for source in ("print('loading')", "comparison = 6 * 7\ncomparison")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    demo.execute(notebook, tmp_path)
    assert "loading" in capfd.readouterr().out
    assert demo.result(notebook, "comparison") == "42"


def test_the_cells_that_the_demo_reads_are_in_the_quickstart():
    notebook = nbformat.read(demo.NOTEBOOK, as_version=4)
    sources = [cell.source.rstrip() for cell in notebook.cells if cell.cell_type == "code"]
    assert any(source.endswith("comparison") for source in sources)
    assert any(f"\nseed = {42}" in source for source in sources)
    assert any('output_dir="outputs/quickstart"' in source for source in sources)
