from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
question = [{"role": "user", "content": "There is a green star and a black triangle. What color is the star?"}]
for model in ("quire-demo", "shout"):  # the base model, or an adapter by its name
    answer = client.chat.completions.create(model=model, messages=question, temperature=0)
    print(f"{model}: {answer.choices[0].message.content}")
