from quire import LLM, SamplingParams, StructuredOutputsParams

llm = LLM()
question = [{"role": "user", "content": "There is a red star. Which shape is there?"}]
schema = {
    "type": "object",
    "properties": {"shape": {"enum": ["star", "circle"]}, "color": {"enum": ["red", "blue"]}},
    "required": ["shape", "color"],
    "additionalProperties": False,
}
shape = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
shaped = SamplingParams(temperature=0, max_tokens=60, structured_outputs=shape)
print(llm.chat(question, shaped, use_tqdm=False)[0].outputs[0].text)

draw = {"type": "function", "function": {"name": "draw", "description": "Draw a shape.", "parameters": schema}}
free = SamplingParams(temperature=0, max_tokens=80)
answer = llm.chat(question, free, use_tqdm=False, tools=[draw], tool_choice="required", parallel_tool_calls=False)[0]
for call in answer.outputs[0].message.tool_calls:
    print(call.name, call.arguments)
