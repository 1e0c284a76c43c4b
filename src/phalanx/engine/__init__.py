"""The serving engine: blocks, scheduler, runner, sampler, text, and the two public levels on top of them."""

from phalanx.engine.async_llm import AsyncLLM
from phalanx.engine.build import build_engine
from phalanx.engine.guides import Guide
from phalanx.engine.inference_engine import InferenceEngine, SchedulingError, SchedulingResult
from phalanx.engine.llm import LLM
from phalanx.engine.outputs import Chunk, CompletionOutput, RequestOutput
from phalanx.engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "CompletionOutput",
    "Guide",
    "InferenceEngine",
    "RequestOutput",
    "SamplingParams",
    "SchedulingError",
    "SchedulingResult",
    "build_engine",
]
