"""A long mixed load under attack: soak.py [--minutes M] [--clients N] [--no-attacks] [--seed S]

A server of the bundled model answers N clients without a pause: texts and pictures, the base model, its adapters and a
mixture of them, streamed and whole, several answers at a time, some left in the middle, while adapters are reloaded and
hostile clients (`attacks.py`) do their worst, one after the other. Every answer is compared with LLM's, token by token.

It ends with exit code 1 for a wrong token, a status of 500 or more, a failed change of adapters, blocks that are not
given back, or memory that grew by more than GROWTH after the first fifth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx
import psutil
from attacks import all_attacks

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import ADAPTERS, adapter_path, picture_path

GROWTH = 100 << 20  # bytes of the server's memory
CHANGE = 0.25  # seconds between two changes of adapters
PAUSE = 1.0  # seconds between two attacks
BLEND = "blend"
PROMPTS = ("Once upon a time", "One day, a red circle", "There is a blue star", "A drum", "The green triangle")
QUESTIONS = ("What do you see?", "What color is the star?", "How many shapes are there?")


@dataclass
class Request:
    """One of the requests that are asked again and again, and its answer: the tokens of each choice."""

    model: str
    prompt: str | None
    question: str
    sampling: dict[str, Any]
    answer: list[list[int]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        url = "data:image/png;base64," + base64.b64encode(Path(picture_path()).read_bytes()).decode()
        picture = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [picture, {"type": "text", "text": self.question}]}]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompt is None else "/v1/completions"

    def body(self, stream: bool) -> dict[str, Any]:
        asked = {"messages": self.messages} if self.prompt is None else {"prompt": self.prompt}
        return {"model": self.model, "stream": stream, "return_token_ids": True, **asked, **self.sampling}


@dataclass
class Tally:
    """What has been seen."""

    statuses: Counter[int] = field(default_factory=Counter)
    attacked: Counter[tuple[str, int]] = field(default_factory=Counter)
    right: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def see(self, status: int, what: str) -> bool:
        self.statuses[status] += 1
        if status >= 500:
            self.faults.append(f"{status} for {what}")
        return status == 200


def requests(count: int, seed: int) -> list[Request]:
    """Different requests with the answers that LLM gives to each alone."""
    draw = random.Random(seed)
    llm = LLM(enable_lora=True)
    for name in ADAPTERS:
        llm.load_lora_adapter(name, str(adapter_path(name)))
    made = []
    for number in range(count):
        sampling: dict[str, Any] = {"max_tokens": draw.randint(4, 40), "temperature": 0.0}
        if number % 3 == 0:
            sampling |= {"temperature": 0.9, "seed": number, "n": draw.choice([1, 2, 3]), "top_p": 0.95}
        if number % 5 == 1:
            sampling |= {"stop": ["the"], "repetition_penalty": 1.1}
        model = draw.choice(["quire-demo", *ADAPTERS, BLEND])
        prompt = None if draw.random() < 0.4 else draw.choice(PROMPTS)
        one = Request(model, prompt, draw.choice(QUESTIONS), sampling)
        parts = [(name, 0.5) for name in ADAPTERS] if model == BLEND else None
        adapter = None if model == "quire-demo" else LoRARequest(model, adapters=parts)
        params = SamplingParams(**sampling)
        if prompt is None:
            output = llm.chat(one.messages, params, use_tqdm=False, lora_request=adapter)[0]
        else:
            output = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)[0]
        one.answer = [list(choice.token_ids) for choice in output.outputs]
        made.append(one)
    return made


class Server:
    """The bundled model's server; its log is kept for the end."""

    def __init__(self) -> None:
        flags = ("--allow-runtime-lora", "--lora-root", str(adapter_path(ADAPTERS[0]).parent), "--enable-lora")
        self.log = Path("soak.log").open("w+")  # noqa: SIM115 (as long as the server)
        command = [sys.executable, "-m", "quire.server", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=self.log)
        end = time.monotonic() + 120
        while not (found := re.search(r"listening on http://([\d.]+):(\d+)", Path("soak.log").read_text())):
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not start: see soak.log")
            time.sleep(0.1)
        self.host, self.port = found[1], int(found[2])
        self.url = f"http://{self.host}:{self.port}"

    def memory(self) -> int:
        """Bytes of the server and its children that are resident."""
        server = psutil.Process(self.process.pid)
        family = [server, *server.children(recursive=True)]
        return sum(one.memory_info().rss for one in family if one.is_running())


async def ask(client: httpx.AsyncClient, one: Request, stream: bool, leave: bool, tally: Tally) -> None:
    """One request, compared; leave: hang up after the first pieces."""
    if not stream:
        answer = await client.post(one.path, json=one.body(False))
        if tally.see(answer.status_code, f"{one.model} {one.path}: {answer.text[:200]}"):
            compare(one, [choice["token_ids"] for choice in answer.json()["choices"]], tally)
        return
    tokens: list[list[int]] = [[] for _ in one.answer]
    async with client.stream("POST", one.path, json=one.body(True)) as answer:
        if not tally.see(answer.status_code, f"{one.model} {one.path}, streamed"):
            return
        pieces = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                tally.faults.append(f"an error in a stream: {line[:200]}")
                return
            for choice in event["choices"]:
                tokens[choice["index"]] += choice.get("token_ids") or []
            pieces += 1
            if leave and pieces == 3:
                tally.left += 1
                return
    compare(one, tokens, tally)


def compare(one: Request, tokens: list[list[int]], tally: Tally) -> None:
    if tokens == one.answer:
        tally.right += 1
    else:
        tally.faults.append(f"wrong tokens: {one.model} {one.prompt or one.question!r} {one.sampling}: {tokens}")


async def client_loop(server: Server, pool: list[Request], number: int, end: float, tally: Tally) -> None:
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        while time.monotonic() < end:
            one = draw.choice(pool)
            stream = draw.random() < 0.5
            try:
                await ask(client, one, stream, stream and draw.random() < 0.2, tally)
            except httpx.HTTPError as error:
                tally.faults.append(f"{type(error).__name__} for {one.model} {one.path}: {error}")


async def change_adapters(server: Server, end: float, tally: Tally) -> None:
    steps = [
        ("load", {"lora_name": "extra", "lora_path": str(adapter_path("french"))}),
        ("load", {"lora_name": "french", "lora_path": str(adapter_path("french")), "load_inplace": True}),
        ("load", {"lora_name": "extra", "lora_path": str(adapter_path("shout")), "load_inplace": True}),
        ("load", {"lora_name": "shout", "lora_path": str(adapter_path("shout")), "load_inplace": True}),
        ("unload", {"lora_name": "extra"}),
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        number = 0
        while time.monotonic() < end:
            kind, data = steps[number % len(steps)]
            answer = await client.post(f"/v1/{kind}_lora_adapter", json=data)
            if not tally.see(answer.status_code, f"{kind} {data['lora_name']}: {answer.text[:200]}"):
                tally.faults.append(f"{kind} {data['lora_name']}: {answer.text[:200]}")
            number += 1
            await asyncio.sleep(CHANGE)


async def attack(server: Server, end: float, tally: Tally) -> None:
    attacks = all_attacks()
    while time.monotonic() < end:
        for name, strike in attacks.items():
            if time.monotonic() < end:
                status = await strike(server.host, server.port)
                tally.attacked[name, status] += 1
                tally.see(status, f"the attack {name!r}")
                await asyncio.sleep(PAUSE)


async def watch(server: Server, end: float, tally: Tally) -> None:
    """Memory and the time that /health takes, each second."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        while time.monotonic() < end:
            begin = time.monotonic()
            tally.see((await client.get("/health")).status_code, "/health")
            tally.health.append(time.monotonic() - begin)
            tally.memory.append(server.memory())
            await asyncio.sleep(1.0)


async def blocks_in_use(server: Server) -> float:
    """The share of the KV pool that is taken when all clients have gone."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for _ in range(100):
            text = (await client.get("/metrics")).text
            used = float(re.search(r"^quire_kv_cache_usage_ratio (\S+)$", text, re.M)[1])  # type: ignore[index]
            if used == 0:
                break
            await asyncio.sleep(0.1)
        return used


async def soak(server: Server, pool: list[Request], clients: int, seconds: float, hostile: bool) -> Tally:
    tally, end = Tally(), time.monotonic() + seconds
    blend = {"lora_name": BLEND, "adapters": [{"name": name, "weight": 0.5} for name in ADAPTERS]}
    httpx.post(f"{server.url}/v1/load_lora_adapter", json=blend, timeout=60).raise_for_status()
    tasks = [client_loop(server, pool, number, end, tally) for number in range(clients)]
    tasks += [change_adapters(server, end, tally), watch(server, end, tally)]
    if hostile:
        tasks.append(attack(server, end, tally))
    await asyncio.gather(*tasks)
    used = await blocks_in_use(server)
    if used:
        tally.faults.append(f"{used:.3%} of the KV pool is not given back")
    return tally


def report(tally: Tally) -> int:
    settled = tally.memory[len(tally.memory) // 5 :]
    first, last = (median(part) for part in (settled[: len(settled) // 4], settled[-len(settled) // 4 :]))
    if last - first > GROWTH:
        tally.faults.append(f"memory grew by {(last - first) / 2**20:.0f} MiB")
    health = sorted(tally.health)
    print(f"answers: {tally.right} right, {tally.left} left in the middle; statuses {dict(tally.statuses)}")
    print(f"memory: {first / 2**20:.0f} MiB, then {last / 2**20:.0f} MiB, at most {max(tally.memory) / 2**20:.0f} MiB")
    print(f"/health: median {1000 * median(health):.0f} ms, slowest {1000 * health[-1]:.0f} ms")
    for (name, status), count in sorted(tally.attacked.items()):
        print(f"attack {name:15s} {count:4d} x {status or 'closed'}")
    for fault, count in Counter(tally.faults).most_common(20):
        print(f"FAULT {count} x {fault}")
    print("no fault" if not tally.faults else f"{len(tally.faults)} faults")
    return 1 if tally.faults else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--attacks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pool = requests(60, arguments.seed)
    server = Server()
    try:
        tally = asyncio.run(soak(server, pool, arguments.clients, 60 * arguments.minutes, arguments.attacks))
    finally:
        server.process.terminate()
        server.process.wait(60)
    sys.exit(report(tally))


if __name__ == "__main__":
    main()
