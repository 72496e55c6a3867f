from quire import LLMEngine, RequestOutputKind, SamplingParams

engine = LLMEngine()
params = SamplingParams(temperature=0, max_tokens=30, output_kind=RequestOutputKind.DELTA)
engine.add_request("a", "Once upon a time", params)
while engine.has_unfinished_requests():
    for output in engine.step():
        print(output.outputs[0].text, end="", flush=True)
print()
