"""One worker leads: two workers of a service, an endpoint that only the leader serves, and a hand-over.

Serve it yourself with `uvicorn examples.fastapi_leader:app --workers 3`.

Prints:

    ann: /reindex 200, /leaderz 200, /readyz 200
    bob: /reindex 503, /leaderz 503, /readyz 200
    bob knows that ann leads
    ann has left
    bob: /reindex 200, /leaderz 200, /readyz 200
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from fastapi import BackgroundTasks, FastAPI
from fastapi.testclient import TestClient

from grel_core import Grelmicro
from grel_core.coordination import LeaderElection
from grel_core.providers.sqlite import SQLiteProvider
from grel_fastapi import coordination_router, health_router, leader_only


def service(path: Path, worker: str | None = None) -> FastAPI:
    """One worker of the service."""
    micro = Grelmicro(uses=[SQLiteProvider(path), LeaderElection("default", worker=worker)])
    app = micro.install(FastAPI())
    app.include_router(health_router())
    app.include_router(coordination_router())

    @micro.leader_loop(every=30)
    async def refresh_prices() -> None:
        """Runs on the leader, every 30 seconds."""

    @leader_only(otherwise="skip")
    async def tell_customers() -> None:
        """A background task must not raise: on the other workers it does nothing."""

    @app.post("/reindex")
    @leader_only
    async def reindex(later: BackgroundTasks) -> str:
        """The other workers answer 503."""
        later.add_task(tell_customers)
        return "done"

    return app


app = service(Path("leases.db"))


def show(worker: str, client: TestClient) -> None:
    """What one worker answers."""
    statuses = [
        client.post("/reindex").status_code,
        *(client.get(path).status_code for path in ("/leaderz", "/readyz")),
    ]
    print("{}: /reindex {}, /leaderz {}, /readyz {}".format(worker, *statuses))


def wait_for(client: TestClient, **expected: str) -> None:
    """Until `/coordination/leader` says so."""
    while not expected.items() <= client.get("/coordination/leader").json().items():
        time.sleep(0.01)


def main(path: Path) -> None:
    """Ann leads because she starts first; bob takes over the moment she leaves."""
    ann, bob = TestClient(service(path, "ann")), TestClient(service(path, "bob"))
    with ExitStack() as anns_life:
        anns_life.enter_context(ann)
        wait_for(ann, state="leading")
        with bob:
            wait_for(bob, state="following")
            show("ann", ann)
            show("bob", bob)
            print(f"bob knows that {bob.get('/coordination/leader').json()['leader']['identity']} leads")

            anns_life.close()
            print("ann has left")
            wait_for(bob, state="leading")
            show("bob", bob)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory) / "leases.db")
