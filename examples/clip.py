from PIL import Image, ImageDraw

from quire import LLM, SamplingParams


def frame(left: int) -> Image.Image:
    image = Image.new("RGB", (160, 120), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((left, 20, left + 40, 60), fill="red")
    draw.rectangle((60, 80, 90, 110), fill="blue")
    return image


llm = LLM()
clip = {"type": "video", "video": [frame(left) for left in (10, 40, 70, 100)]}  # or video_url, of a file
question = [{"role": "user", "content": [clip, {"type": "text", "text": "What changed?"}]}]
answer = llm.chat(question, SamplingParams(temperature=0), use_tqdm=False)[0]
print(answer.outputs[0].text)
