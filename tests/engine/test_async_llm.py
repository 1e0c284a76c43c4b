"""AsyncLLM: many tasks at once, cancelled or not, get what each would get alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phalanx import LLM, AsyncLLM
from phalanx.engine.async_llm import EngineDead


@pytest.fixture
def served(tiny_folder: Path) -> AsyncLLM:
    return AsyncLLM(LLM(tiny_folder, num_blocks=40, block_size=4, max_num_batched_tokens=16))


def test_tasks_get_their_own_answers(served: AsyncLLM, tiny_folder: Path, prompts: list[list[int]]) -> None:
    expected = LLM(tiny_folder, num_blocks=100, block_size=4).generate(prompts, max_tokens=10)

    async def stream(prompt: list[int]) -> tuple[str, list[int]]:
        chunks = [chunk async for chunk in served.stream(prompt, max_tokens=10)]
        assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        return "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.token_ids]

    async def main() -> None:
        whole = await asyncio.gather(*(served.generate(prompt, max_tokens=10) for prompt in prompts))
        pieces = await asyncio.gather(*(stream(prompt) for prompt in prompts))
        for output, (text, ids), alone in zip(whole, pieces, expected, strict=True):
            assert output.outputs == alone.outputs
            assert (text, ids) == (alone.outputs[0].text, alone.outputs[0].token_ids)
        several = await served.generate("hi", temperature=1.0, seed=1, n=3, max_tokens=4)
        assert len(several.outputs) == 3
        count = sum(
            [chunk.finish_reason is not None async for chunk in served.stream("hi", temperature=1.0, n=3, max_tokens=4)]
        )
        assert count == 3
        await asyncio.to_thread(served.close)

    asyncio.run(main())


def test_cancelled_tasks_free_their_blocks(served: AsyncLLM) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(served.generate([5, k], max_tokens=60, ignore_eos=True)) for k in range(6, 14)]
        while not served.llm.has_work:
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(item, asyncio.CancelledError) for item in found] == [True, False] * 4
        stream = served.stream([5, 6], max_tokens=60, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        await asyncio.to_thread(served.close)

    asyncio.run(main())
    served.llm.core.check_idle()


def test_bad_requests_and_a_closed_engine(served: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await served.generate([10**6])
        with pytest.raises(ValueError, match="temprature"):
            await served.generate([5], temprature=1)
        chat = await served.generate([{"role": "user", "content": "hi"}], max_tokens=2)
        assert chat.outputs[0].finish_reason is not None
        waiting = asyncio.create_task(served.generate([5, 6], max_tokens=150, ignore_eos=True))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(served.close)
        served.close()
        with pytest.raises(EngineDead, match="closed"):
            await waiting
        with pytest.raises(EngineDead, match="closed"):
            await served.generate([5])

    asyncio.run(main())


def test_a_closed_event_loop_drops_its_own_request_only(served: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()

    async def start() -> object:
        stream = served.stream([5], max_tokens=100, ignore_eos=True)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(start())
    loop.close()
    assert len(asyncio.run(served.generate([5, 6], max_tokens=40, ignore_eos=True)).outputs[0].token_ids) == 40
    del stream
    served.close()


def test_closing_tells_everybody(served: AsyncLLM) -> None:
    async def main() -> None:
        short = [asyncio.create_task(served.generate([5, k], max_tokens=2)) for k in range(6, 10)]
        long = [asyncio.create_task(served.generate([6, k], max_tokens=100, ignore_eos=True)) for k in range(6, 10)]
        await asyncio.sleep(0.01)
        served.close()
        done, waiting = await asyncio.wait([*short, *long], timeout=10)
        assert not waiting
        assert all(isinstance(task.exception(), EngineDead | None) for task in done)

    asyncio.run(main())
