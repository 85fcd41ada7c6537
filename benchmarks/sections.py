"""A report that several benchmarks write: each owns the section under its heading of the first rank, and no other."""

from pathlib import Path


def split_sections(report: str) -> list[tuple[str, str]]:
    """Title and body of every section, in order; what stands before the first heading has the title ``""``.

    A line that begins with ``# `` inside a code fence is no heading.

    >>> split_sections("# Speed\\n\\n1 ms\\n")
    [('Speed', '\\n1 ms\\n')]
    """
    sections = [("", "")]
    fence = ""
    for line in report.splitlines(keepends=True):
        mark = line.lstrip()[:3]
        if fence:
            fence = "" if mark == fence else fence
        elif mark in ("```", "~~~"):
            fence = mark
        elif line.startswith("# "):
            sections.append((line[2:].strip(), ""))
            continue
        sections[-1] = (sections[-1][0], sections[-1][1] + line)
    return [section for section in sections if section != ("", "")]


def read_section(path: Path, title: str) -> str:
    """Body of a section without its heading; empty where the report or the section is absent."""
    report = path.read_text(encoding="utf-8") if path.exists() else ""
    return dict(split_sections(report)).get(title, "").strip("\n")


def write_section(path: Path, title: str, text: str) -> None:
    """Put a section in the place of the one of its name, or at the end; all others stay as they are.

    Args:
        path: the report; made where it is absent.
        title: heading, without its ``#``.
        text: what stands below the heading; its own headings are of lower rank.

    Raises:
        ValueError: ``text`` holds a heading of the first rank outside a code fence, hence a section of its own.
    """
    strays = [name for name, _ in split_sections(text) if name]
    if strays:
        raise ValueError(f"text: # {strays[0]} would begin a section of its own inside # {title}")
    report = path.read_text(encoding="utf-8") if path.exists() else ""
    sections = split_sections(report)
    written = (title, text)
    places = [place for place, (name, _) in enumerate(sections) if name == title]
    if places:
        sections[places[0]] = written
    else:
        sections.append(written)
    parts = [(f"# {name}\n\n" if name else "") + body.strip("\n") + "\n" for name, body in sections]
    path.write_text("\n".join(parts), encoding="utf-8")
