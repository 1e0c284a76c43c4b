"""A rank that an engine started: ``python -m phalanx.engine.worker SPEC``. It builds its part and follows rank 0."""

from __future__ import annotations

import json
import sys

from phalanx.config import engine_config
from phalanx.distributed.group import GroupError
from phalanx.distributed.rendezvous import Rendezvous
from phalanx.engine.build import engine_of_rank
from phalanx.engine.opened_model import OpenedModel
from phalanx.engine.ranks import Team, join, set_threads
from phalanx.engine.step import Close


def main(spec: str) -> int:
    """Runs until rank 0 closes the engine; 1 if the group fails."""
    told = json.loads(spec)
    config = engine_config(told["config"])
    set_threads(config, config.tensor_parallel_size)
    group = join(Rendezvous.from_env(), config)
    opened = OpenedModel(told["model"], told["hf_config"])
    try:
        engine = engine_of_rank(opened, config, Team(group), told["scheduled"])
        try:
            while not isinstance(engine.executor.follow(), Close):
                pass
        finally:
            # NCCL ends only once no graph holds its calls.
            engine.runner.release()
        group.close()
    except (GroupError, ValueError) as error:
        # Rank 0 meets the same error, or is told of this one; a traceback of each rank would only hide it.
        print(f"this rank ends: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
