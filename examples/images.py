from PIL import Image

from quire import LLM, SamplingParams
from quire.demo import picture_path

llm = LLM()
picture = {"type": "image_pil", "image_pil": Image.open(picture_path())}  # or image_url, as OpenAI's API has it
for text in ("What do you see?", "What color is the star?"):
    question = [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]
    answer = llm.chat(question, SamplingParams(temperature=0), use_tqdm=False)[0]
    print(answer.outputs[0].text)
