from PIL import Image

from quire import LLM, SamplingParams
from quire.demo import picture_path

llm = LLM()
greedy = SamplingParams(temperature=0)
picture = Image.open(picture_path())  # or an array, an image file's bytes, or a URL
prompt = "<|user|><|image|>How many shapes are there?<|end|><|assistant|>"
answer = llm.generate({"prompt": prompt, "multi_modal_data": {"image": picture}}, greedy, use_tqdm=False)[0]
print(answer.outputs[0].text)

for question in ("What do you see?", "What color is the star?"):
    content = [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": question}]
    answer = llm.chat([{"role": "user", "content": content}], greedy, use_tqdm=False)[0]
    print(answer.outputs[0].text)
