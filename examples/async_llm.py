"""Many asyncio tasks, one engine, which batches what they ask: python examples/async_llm.py [MODEL]"""

import asyncio
import sys

from phalanx import AsyncLLM


async def answer(llm: AsyncLLM, question: str) -> str:
    pieces = [chunk.text async for chunk in llm.stream([{"role": "user", "content": question}], max_tokens=30)]
    return f"{question}\n  {''.join(pieces)}"


async def run(model: str) -> None:
    questions = [f"What is {n} plus {n}?" for n in range(1, 6)]
    async with AsyncLLM(model) as llm:
        for text in await asyncio.gather(*(answer(llm, question) for question in questions)):
            print(text)

        # A task that is cancelled takes its request with it.
        try:
            await asyncio.wait_for(llm.generate("Once upon a time"), timeout=0.5)
        except TimeoutError:
            print("[too long: cancelled]")


if __name__ == "__main__":
    asyncio.run(run(*(sys.argv[1:] or ["smollm2"])))
