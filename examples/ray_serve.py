"""A model behind Ray Serve, on as many machines as the cluster has: ``python examples/ray_serve.py smollm2``.

Each replica is a whole server: engines in processes of their own, OpenAI's routes, metrics. Ray starts the replicas
where there are CPUs and GPUs for them, spreads requests over them, and replaces those that fail.
"""

from __future__ import annotations

import argparse

from ray import serve

from phalanx.server.asgi import Application
from phalanx.server.settings import ServerSettings


def deployment(settings: ServerSettings, replicas: int, cpus: float, gpus: float) -> serve.Application:
    """The application that ``serve.run`` takes.

    Args:
        settings: of each replica; with ``restart``, an engine that dies is started again within its replica.
        replicas: how many there are.
        cpus, gpus: what one takes; as many GPUs as ``tensor_parallel_size``.
    """

    @serve.deployment(
        num_replicas=replicas,
        # The engine has a queue of its own, which sees what can be batched: let it have the requests.
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    @serve.ingress(lambda: Application(settings))
    class Phalanx:
        pass

    return Phalanx.bind()  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a path or hub id that every machine can open")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="of a replica")
    parser.add_argument("--gpus", type=int, default=0, help="of a replica: its ranks")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    engine = {"tensor_parallel_size": max(asked.gpus, 1)}
    settings = ServerSettings(model=asked.model, engine=engine, restart=True)
    serve.start(http_options={"port": asked.port})
    serve.run(deployment(settings, asked.replicas, asked.cpus, asked.gpus), name="phalanx", blocking=True)


if __name__ == "__main__":
    main()
