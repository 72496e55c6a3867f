from PIL import Image

from quire import LLM, SamplingParams
from quire.demo import picture_path

llm = LLM()
picture = Image.open(picture_path())  # or an array, an image file's bytes, or a URL
prompt = "<|user|><|image|>How many shapes are there?<|end|><|assistant|>"
request = {"prompt": prompt, "multi_modal_data": {"image": picture}}
answer = llm.generate(request, SamplingParams(temperature=0), use_tqdm=False)[0]
print(answer.outputs[0].text)
