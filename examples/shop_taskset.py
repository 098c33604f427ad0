"""The agent of shop_agent.py as a taskset of verifiers with a harness of its own.

    pip install 'peralta_zmq[verifiers]'
    PYTHONPATH=examples bin/lan local @ configs/shop_agent.toml --task.name verifiers:shop_taskset \
        --model.name MODEL
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import OpenAI
from shop_agent import PRICES, answer, multiply


class Data(vf.TaskData):
    answer: str


class Price(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == f"answer: {self.data.answer}")


class Shop(vf.Taskset[Price, vf.TasksetConfig]):
    def load(self) -> Iterator[Price]:
        for number in range(2, 41):
            for item in PRICES:
                price = multiply(str(number), str(PRICES[item]))
                data = Data(prompt=f"What do {number} {item}s cost?", answer=price)
                yield Price(data, self.config.task)


class ShopHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        with OpenAI(base_url=endpoint, api_key=secret) as client:
            await asyncio.to_thread(answer, client, ctx.model, data.prompt)
        return vf.ProgramResult(0, "", "")


__all__ = ["Shop", "ShopHarness"]
