"""Many prompts at once: python examples/generate.py [MODEL]"""

import sys

from phalanx import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "What is the boiling point of water?", "Who wrote Hamlet?"]


def main(model: str = "smollm2") -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(model) as llm:
        for question, output in zip(QUESTIONS, llm.chat(conversations, max_tokens=40), strict=True):
            print(f"{question}\n  {output.text}")

        # Settings may differ from prompt to prompt; log-probabilities are of the model's raw logits.
        prompts = ["Once upon a time", "The three primary colours are"]
        params = [
            SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=30),
            SamplingParams(max_tokens=8, logprobs=1),
        ]
        story, colours = llm.generate(prompts, params)
        print(f"{story.prompt}{story.text}")
        for token, logprobs in zip(colours.outputs[0].token_ids, colours.outputs[0].logprobs or [], strict=True):
            print(f"  {llm.tokenizer.decode([token])!r}: {logprobs[token]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
