"""`python -m grel_core schema ...` prints what an operator applies by hand."""

import subprocess
import sys


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grel_core", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_sql_names_the_schema_that_was_asked_for() -> None:
    answer = run("schema", "postgres", "--schema", "leases")
    assert answer.returncode == 0
    assert "CREATE SCHEMA" in answer.stdout
    assert '"leases"' in answer.stdout
    assert '"grel"' not in answer.stdout


def test_a_schema_that_is_no_name_is_refused_in_one_line() -> None:
    answer = run("schema", "postgres", "--schema", 'x"; DROP TABLE users; --')
    assert answer.returncode != 0
    assert "plain name" in answer.stderr.splitlines()[-1]
    assert "DROP TABLE" not in answer.stdout


def test_the_role_for_kubernetes_asks_for_leases_and_nothing_else() -> None:
    answer = run("schema", "kubernetes", "--namespace", "shop")
    assert answer.returncode == 0
    assert "namespace: shop" in answer.stdout
    assert "resources: [leases]" in answer.stdout
    assert "delete" not in answer.stdout
    assert "*" not in answer.stdout
