"""An answer as it comes: python examples/stream.py [MODEL]"""

import sys

from phalanx import LLM


def main(model: str = "smollm2") -> None:
    messages = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    with LLM(model) as llm:
        # Leaving the loop early would abort the request.
        for chunk in llm.stream(messages, max_tokens=60):
            print(chunk.text, end="", flush=True)
        print(f"\n[{chunk.finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
