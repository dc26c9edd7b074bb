"""The command line: what an operator prepares by hand, printed."""

import click


@click.group()
def main() -> None:
    """Coordination for services that run as many replicas."""


@main.group()
def schema() -> None:
    """Print what a store needs before the first start, for those who apply it themselves."""


@schema.command()
@click.option("--schema", "name", default="grel", show_default=True, help="The schema that holds all of it.")
def postgres(name: str) -> None:
    """SQL for PostgreSQL; run it as a role that may create a schema, then start with auto_migrate=False."""
    from grel_core.providers.postgres import schema_sql

    click.echo(schema_sql(name))


@schema.command()
@click.option("--namespace", default="default", show_default=True, help="The namespace that holds the Leases.")
def kubernetes(namespace: str) -> None:
    """The least Role for Kubernetes, as YAML for `kubectl apply -f -`."""
    from grel_core.providers.kubernetes import rbac_yaml

    click.echo(rbac_yaml(namespace))
