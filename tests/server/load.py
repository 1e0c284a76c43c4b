"""Many clients with bad manners: ``python -m tests.server.load URL --clients 200 --seconds 60``.

Each asks again and again, streamed or whole, and leaves now and then: in the middle of a stream, before the answer, or
before it has sent its body. Prints a JSON object with what came back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter

NAME = "tiny"


async def ask(host: str, port: int, dice: random.Random, counts: Counter[str]) -> None:
    """One request over a connection of its own."""
    body = {"model": NAME, "max_tokens": dice.randint(1, 60), "ignore_eos": True, "stream": dice.random() < 0.6}
    path = "/v1/completions"
    kind = dice.random()
    # Of a few hundred prompts: the tokenizer keeps up to 10,000 words that it has seen, and these texts are one each.
    if kind < 0.5:
        body |= {"prompt": "shared beginning " * dice.randint(0, 8) + str(dice.randrange(300))}
    elif kind < 0.9:
        path, body = (
            "/v1/chat/completions",
            {**body, "messages": [{"role": "user", "content": str(dice.randrange(300))}]},
        )
    elif kind < 0.95:
        body |= {"prompt": ["a", "b"], "n": 2, "max_tokens": 20}
    else:
        body |= {"prompt": "x", "temperature": -1}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode())
        manners = dice.random()
        if manners < 0.02:
            writer.write(data[:10])
            await writer.drain()
            counts["left before the body"] += 1
            return
        writer.write(data)
        await writer.drain()
        if manners < 0.15:
            await asyncio.wait_for(reader.read(dice.choice([1, 400])), dice.random() * 0.5)
            counts["left early"] += 1
            return
        answer = await reader.read()
        status = answer.split(b" ", 2)[1].decode()
        if status == "200" and b'"code":"request_timeout"' in answer:
            status = "408"
        elif status == "200" and b'"error":' in answer:
            status = "broken stream"
        counts[status] += 1
    except TimeoutError:
        counts["left early"] += 1
    finally:
        writer.close()


async def client(host: str, port: int, seed: int, deadline: float, counts: Counter[str]) -> None:
    """One client until the end."""
    dice = random.Random(seed)
    while time.monotonic() < deadline:
        try:
            await ask(host, port, dice, counts)
        except OSError as error:
            counts[type(error).__name__] += 1
            await asyncio.sleep(0.1)


async def load(host: str, port: int, clients: int, seconds: float, seed: int) -> Counter[str]:
    """All clients at once."""
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    await asyncio.gather(*(client(host, port, seed + number, deadline, counts) for number in range(clients)))
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    host, port = given.url.removeprefix("http://").split(":")
    print(json.dumps(asyncio.run(load(host, int(port), given.clients, given.seconds, given.seed))))
