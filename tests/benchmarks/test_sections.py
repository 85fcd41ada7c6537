"""One report, several writers: each replaces its own section and leaves every other as it was."""

import pytest

from benchmarks.sections import read_section, split_sections, write_section

FENCED = "figures\n\n```sh\n# not a heading\nmake bench\n```\n\n## Part\n\nmore"


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "RESULTS.md"
    write_section(path, "Speed", "fast")
    write_section(path, "Kernel", FENCED)
    write_section(path, "Table", "| a |\n| --- |")
    return path


def test_sections_are_written_in_order(report):
    expected = f"# Speed\n\nfast\n\n# Kernel\n\n{FENCED}\n\n# Table\n\n| a |\n| --- |\n"
    assert report.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("title", ["Speed", "Kernel", "Table"])
def test_a_section_is_replaced_in_place_and_alone(report, title):
    before = dict(split_sections(report.read_text(encoding="utf-8")))
    write_section(report, title, "new")
    after = dict(split_sections(report.read_text(encoding="utf-8")))
    assert list(after) == list(before)
    assert {name for name in before if after[name].strip() != before[name].strip()} == {title}
    assert read_section(report, title) == "new"


def test_writing_the_same_again_changes_nothing(report):
    before = report.read_bytes()
    write_section(report, "Kernel", read_section(report, "Kernel"))
    assert report.read_bytes() == before


def test_a_title_is_no_prefix_of_another(report):
    write_section(report, "Speed of sound", "343")
    write_section(report, "Speed", "new")
    assert read_section(report, "Speed of sound") == "343"
    assert read_section(report, "Speed") == "new"


def test_what_stands_before_the_first_heading_stays(tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text("preamble\n\n# Speed\n\nold\n", encoding="utf-8")
    write_section(path, "Speed", "new")
    assert path.read_text(encoding="utf-8") == "preamble\n\n# Speed\n\nnew\n"


def test_absent_sections_are_empty(report, tmp_path):
    assert read_section(report, "Nothing") == ""
    assert read_section(tmp_path / "absent.md", "Speed") == ""


def test_a_heading_of_the_first_rank_is_refused(report):
    before = report.read_bytes()
    with pytest.raises(ValueError, match="# Other would begin a section"):
        write_section(report, "Speed", "figures\n\n# Other\n")
    assert report.read_bytes() == before
