import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx import LLM
from phalanx.bench.hf_copy import hf_folder
from phalanx.weights.dummy import DummySource
from tests.models.tiny import llama_config


def test_a_hugging_face_folder_is_taken_as_it_is(tiny_folder, tmp_path):
    assert hf_folder(str(tiny_folder), torch.float32, False, tmp_path / "copy") == tiny_folder
    assert not (tmp_path / "copy").exists()


def test_random_weights_are_copied(tiny_folder, tmp_path):
    folder = hf_folder(str(tiny_folder), torch.bfloat16, True, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype is torch.bfloat16
    expected = DummySource(llama_config(vocab_size=model.config.vocab_size).to_dict())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.read(name).bfloat16()), name
    assert AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]


def test_a_serialised_checkpoint_is_refused(tiny_folder, tmp_path):
    with LLM(tiny_folder, num_blocks=8) as llm:
        llm.engine.serialize(tmp_path / "served")
    with pytest.raises(ValueError, match="serialised checkpoint"):
        hf_folder(str(tmp_path / "served"), torch.float32, False, tmp_path / "copy")


@pytest.mark.slow
def test_a_gguf_file_becomes_a_folder_that_answers(tmp_path):
    folder = hf_folder("smollm2", torch.float32, False, tmp_path / "copy")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == (
        "The capital of France is Paris."
    )
