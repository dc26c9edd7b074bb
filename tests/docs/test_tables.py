"""Tables of the documentation that repeat what the code says, held equal to it."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from grel_core.coordination import LeaderElectionConfig, LockConfig
from grel_fastapi.responses import LEADERSHIP_LOST, PROBLEMS, Problem

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), LEADERSHIP_LOST], ids=lambda problem: problem.slug)
def test_every_answer_is_in_the_table(problem: Problem) -> None:
    row = f"| {problem.status} | `{problem.slug}` | {problem.close} |"
    assert row in (DOCS / "fastapi.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "config"), [("lock.md", LockConfig), ("election.md", LeaderElectionConfig)])
def test_every_option_is_in_the_table_with_its_default(page: str, config: type[BaseModel]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = [f"| `{name}` | {field.default:g} |" for name, field in config.model_fields.items() if name != "worker"]
    assert [row for row in rows if row not in text] == []
