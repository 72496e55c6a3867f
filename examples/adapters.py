from PIL import Image

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import adapter_path, picture_path

llm = LLM(enable_lora=True)
picture = {"type": "image_pil", "image_pil": Image.open(picture_path())}
question = [{"role": "user", "content": [picture, {"type": "text", "text": "What do you see?"}]}]

llm.load_lora_adapter("shout", adapter_path("shout"))
greedy = SamplingParams(temperature=0, max_tokens=40)
adapters = [None, LoRARequest("french", 1, adapter_path("french")), LoRARequest("shout")]  # in one batch
for answer in llm.chat([question] * 3, greedy, use_tqdm=False, lora_request=adapters):
    print(answer.outputs[0].text)
for adapter in llm.list_lora_adapters():
    freed = llm.unload_lora_adapter(adapter.name)
    print(f"{adapter.name}: rank {adapter.ranks[0]}, {adapter.modules} layers, {freed:,} bytes back")
