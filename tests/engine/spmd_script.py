"""What each rank of a torchrun does: the same calls, whose results it writes down."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from phalanx import LLM, build_engine


def main(folder: str, out: str) -> None:
    with LLM(folder, tensor_parallel_size=2, num_blocks=64, block_size=4) as llm:
        outputs = llm.generate([[5, 6, 7], [8, 9]], max_tokens=6, ignore_eos=True)
        try:
            llm.generate([[10**6]])
            error = ""
        except (ValueError, RuntimeError) as caught:
            error = str(caught)
        llm.serialize(Path(out, "served"))
        try:
            llm.add_request("hello")
            refused = ""
        except RuntimeError as caught:
            refused = str(caught)
        again = llm.generate("hello", max_tokens=3, temperature=1.0)
    with build_engine(folder, tensor_parallel_size=2, num_blocks=64, block_size=4) as engine:
        logits = [engine.put([1], [[5, 6, 7]])[0].tolist(), engine.put([1], [[8]])[0].tolist()]
    found = {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "drawn": again[0].outputs[0].token_ids,
        "error": error,
        "logits": logits,
        "refused": refused,
    }
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
