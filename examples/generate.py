from quire import LLM, SamplingParams

llm = LLM()
prompts = ["Once upon a time", "One day, a red circle"]
for out in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=40), use_tqdm=False):
    print(repr(out.prompt), "->", repr(out.outputs[0].text))
