import torch

from quire import LLM, SamplingParams

llm = LLM(enable_prompt_embeds=True)
rows = torch.randn(5, 192, generator=torch.Generator().manual_seed(1)) / 10
answer = llm.generate({"prompt_embeds": rows}, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
print(len(answer.outputs[0].token_ids), answer.prompt_token_ids)
