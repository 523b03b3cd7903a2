"""What the site shows and nobody writes by hand: made while it is built, never committed.

The reference of commands comes from click, that of settings from `schema/config.py`, that of Python
from docstrings; examples and decisions get a page each. Links that leave docs/ (to an example, say)
work in the repository, and lead to these pages in the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import paceline
from paceline.cli import FROM_SOURCE
from paceline.cli import paceline as program
from paceline.config.help import settings_help

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/api.md": python(),
        "reference/examples.md": examples(),
        "decisions/list.md": decisions(),
    }
    made |= {f"reference/{name.lower()}": (ROOT / name).read_text() for name in ROOT_PAGES}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ lead to the pages that stand for what is there."""
    place = page.file.src_uri
    up = "../" * place.count("/")
    outside = r"\]\((?:\.\./)+"
    text = re.sub(
        rf"{outside}examples/([\w/.-]+?)\)",
        lambda found: f"]({up}reference/examples.md#{anchor(found[1])})",
        text,
    )
    for name in ROOT_PAGES:
        text = re.sub(rf"{outside}{name}", f"]({up}reference/{name.lower()}", text)
    if place in {f"reference/{name.lower()}" for name in ROOT_PAGES}:
        text = re.sub(r"\]\(docs/decisions\)", "](../decisions/list.md)", text)
        text = re.sub(r"\]\(docs/", "](../", text)
        for name in ROOT_PAGES:  # of one to another
            text = text.replace(f"]({name}", f"]({name.lower()}")
    return text


def anchor(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name).strip("-").lower()


def commands() -> str:
    """Every command with its help, as it prints it."""
    lines = ["# Commands", "", "`paceline COMMAND --help` prints the same."]
    parent = click.Context(program, info_name="paceline")
    for name in program.list_commands(parent):
        command = program.get_command(parent, name)
        assert command is not None
        lines += ["", f"## {name}", ""]
        if name in FROM_SOURCE:
            lines += ["Comes with Paceline's source, not with the package.", ""]
        for context in contexts(command, name, parent):
            if context.info_name != name:
                lines += ["", f"### {context.command_path.removeprefix('paceline ')}", ""]
            lines += ["```text", help_without_settings(context), "```"]
    return "\n".join(lines)


def contexts(command: click.Command, name: str, parent: click.Context) -> Iterator[click.Context]:
    """The command, and what it has below it."""
    context = click.Context(command, info_name=name, parent=parent, max_content_width=96)
    yield context
    if isinstance(command, click.Group):
        for below, each in command.commands.items():
            yield from contexts(each, below, context)


def help_without_settings(context: click.Context) -> str:
    """Settings have a page of their own."""
    return context.get_help().partition("\nSettings: ")[0].rstrip()


def settings() -> str:
    """Every setting with its default, by section of the TOML file."""
    lines = [
        "# Settings",
        "",
        "Keys of a configuration (TOML), and of `--set KEY=VALUE` on the command line.",
    ]
    for section, rows in settings_help():
        title = section if section == "the run" else f"[{section}]"
        lines += ["", f"## {title}", "", "| setting and default | meaning |", "|---|---|"]
        for setting, text in rows:
            lines.append(f"| `{cell(setting)}` | {cell(text)} |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def python() -> str:
    """What `import paceline` gives; mkdocstrings reads the docstrings."""
    names = (f"{paceline._HOME[name]}.{name}" for name in paceline.__all__)
    return "\n\n".join(["# Python", *(f"::: {name}" for name in names)])


def examples() -> str:
    """The files of examples/, whole."""
    lines = ["# Examples", "", "Every one of them is run by the tests."]
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix not in (".py", ".toml"):
            continue
        name = path.relative_to(ROOT / "examples").as_posix()
        lines += ["", f"## {name} {{#{anchor(name)}}}", ""]
        lines += [f"```{path.suffix[1:].replace('py', 'python')}", path.read_text().rstrip(), "```"]
    return "\n".join(lines)


def decisions() -> str:
    """The decisions, each half a page, by number."""
    lines = [
        "# Decisions",
        "",
        "What was chosen where one could ask why, and what was rejected.",
        "",
    ]
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = re.sub(r"^#\s*", "", path.read_text().splitlines()[0])
        title = re.sub(r"^\d+[.:]?\s*", "", title)
        lines.append(f"- {path.name[:4]}: [{title}]({path.name})")
    return "\n".join(lines)
