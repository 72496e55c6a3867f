from quire import LLM, BeamSearchParams, SamplingParams

llm = LLM()
question = "There is a green star and a black triangle. What color is the star?"
answer = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0), use_tqdm=False)[0]
print(answer.outputs[0].text)

for beam in llm.beam_search(["Once upon a time"], BeamSearchParams(beam_width=2, max_tokens=12))[0].sequences:
    print(f"{beam.cum_logprob:.2f} {beam.text!r}")
