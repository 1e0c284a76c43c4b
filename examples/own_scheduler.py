"""A scheduler of one's own over the ragged engine: python examples/own_scheduler.py [MODEL]

``put`` is one forward over any mix of prompts, pieces of prompts and single tokens. Here new prompts join while others
are being answered, and a prompt is cut where a step has no room for all of it.
"""

import sys
from collections import deque

from phalanx import build_engine

PROMPTS = [[5, 6, 7, 8, 9], list(range(10, 80)), [11, 12], [30, 31, 32]]
ANSWER = 8
STEP = 32


def main(model: str = "smollm2") -> None:
    with build_engine(model, max_num_seqs=4, max_num_batched_tokens=STEP) as engine:
        waiting = deque(enumerate(PROMPTS))
        # What each sequence still has to be given, and what it has answered.
        todo: dict[int, list[int]] = {}
        answers: dict[int, list[int]] = {}
        while waiting or todo:
            if waiting and len(todo) < engine.max_num_seqs:
                uid, prompt = waiting.popleft()
                todo[uid], answers[uid] = list(prompt), []
            room, batch = STEP, {}
            # Those that answer first: they need one token each.
            for uid in sorted(todo, key=lambda uid: len(todo[uid])):
                tokens, _ = engine.query(uid, min(room, len(todo[uid])), engine.free_blocks)
                if tokens:
                    batch[uid] = [todo[uid].pop(0) for _ in range(tokens)]
                    room -= tokens
            logits = engine.put(batch.keys(), batch.values())
            for uid, token in zip(batch, logits.argmax(-1).tolist(), strict=True):
                if todo[uid]:
                    continue  # more of its prompt is to come
                answers[uid].append(token)
                todo[uid].append(token)
                if len(answers[uid]) == ANSWER:
                    engine.flush(uid)
                    del todo[uid]
        for uid, answer in answers.items():
            print(f"{uid}: {answer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
